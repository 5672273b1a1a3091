"""For the tests of the real vLLM: the tiny models, made once and kept in the ignored build folder, and `needs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.vllm_demo.tiny_model import Models, ensure_models
from tests.vllm.versions import installed, lacks


@pytest.fixture(scope="session")
def models() -> Models:
    return ensure_models(Path(__file__).resolve().parents[2] / "build" / "models")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*features): what vLLM must have for this test, see versions.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this release of vLLM comes too early for; test_versions.py proves that it really does."""
    needed = {item: {feature for mark in item.iter_markers("needs") for feature in mark.args} for item in items}
    if any(needed.values()):
        missing = lacks(installed())
        config.hook.pytest_deselected(items=[item for item in items if needed[item] & missing])
        items[:] = [item for item in items if not needed[item] & missing]
