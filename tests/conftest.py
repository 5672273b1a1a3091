"""What holds for every test: in CI nothing is skipped, and no example of Hypothesis is too slow."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

IN_CI = os.environ.get("CI") == "true"

# The machines are small and shared, so a deadline for one example would measure the neighbours. In CI the examples
# are the same in every run: a failure there is the change's, and can be had again.
settings.register_profile("specdec", deadline=None, derandomize=IN_CI)
settings.load_profile("specdec")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure (xfail) is reported as skipped too; it has run and is meant.
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if IN_CI and report.skipped:
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip into a failure: CI has everything that a test may need, so a skip there hides a missing piece."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"skipped, which CI does not allow: {reason}"
