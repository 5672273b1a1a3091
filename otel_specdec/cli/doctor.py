"""`otel-specdec doctor`: what would be counted in this environment, what keeps it from arriving, and what to do.

It looks at metadata, variables, released sources and the endpoint, and makes one MeterProvider in memory. It never
imports an engine. What an instrumented process decides by a function of `otel_specdec.provider` is asked of that one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from otel_specdec.cli import engine_checks, export_checks, series_checks, way_in_checks
from otel_specdec.cli.findings import Finding, exit_status, show
from otel_specdec.cli.server_command import ServerCommand
from otel_specdec.cli.setup import Setup, warnings_of

_CHECKS: Final[Sequence[Callable[[Setup], Iterator[Finding]]]] = (
    engine_checks.package,
    engine_checks.engines,
    engine_checks.speculation,
    way_in_checks.opt_outs,
    way_in_checks.entry_points,
    way_in_checks.plugins,
    way_in_checks.auto_instrumentation,
    way_in_checks.children,
    export_checks.sdk,
    export_checks.asked_for,
    export_checks.exporters,
    export_checks.reachable,
    export_checks.temporality,
    series_checks.resource,
    series_checks.views,
    series_checks.exemplars,
    series_checks.traces,
)


def examine(setup: Setup) -> list[Finding]:
    """Every finding, in the order in which they are shown."""
    return [finding for check in _CHECKS for finding in check(setup)]


def run(options: argparse.Namespace) -> int:
    """Examine, print, and return the exit status."""
    command = ServerCommand.read(options.server) if options.server else None
    if command:
        os.environ.update(command.variables)  # the SDK reads them itself
    with warnings_of("opentelemetry"):  # what the SDK thinks of a variable is said by a finding, or is not ours
        findings = examine(Setup(command, options.timeout))
    show(findings, as_json=options.json)
    return exit_status(findings)
