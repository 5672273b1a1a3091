"""Fixtures of the tests that run the real SGLang: the tiny model, made once and kept in the ignored build folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.vllm_demo.tiny_model import Models, ensure_models


@pytest.fixture(scope="session")
def models() -> Models:
    return ensure_models(Path(__file__).resolve().parents[2] / "build" / "models")
