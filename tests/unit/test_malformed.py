"""Nothing of ours ever comes out of an engine's method, whatever goes in.

A million of each, instead of what is here: tests/benchmarks/million.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_specdec import SGLangSpecDecInstrumentor, VLLMSpecDecInstrumentor
from otel_specdec.engines import sglang as sglang_adapter
from tests.unit import sglang_stand_in, vllm_stand_in
from tests.unit.collected import Meter
from tests.unit.malformed import Abuse, Hostile, SglangAbuse, VllmAbuse

CALLS = 20_000


@pytest.fixture
def vllm(tmp_path: Path, instrumentor: VLLMSpecDecInstrumentor) -> Iterator[Any]:
    vllm_stand_in.write(tmp_path)
    with vllm_stand_in.importable(tmp_path) as load:
        yield load()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(SGLangSpecDecInstrumentor, "_instance", None)
    monkeypatch.setattr(sglang_adapter.Hooks, "_installed", None)
    with sglang_stand_in.importable() as manager:
        yield manager
        SGLangSpecDecInstrumentor().uninstrument()


def run(abuse: Abuse) -> None:
    for number in range(CALLS):
        abuse.once()
        if number % 500 == 0:
            abuse.check()
    abuse.check()
    assert abuse.calls == CALLS
    # It was worth it: many shapes were wrong, and many right enough to be counted.
    assert sum(abuse.meter.errors().values()) > CALLS / 20
    assert abuse.last["generations"] > CALLS / 20
    assert abuse.works_still()


def test_random_steps_of_vllm(vllm: Any) -> None:
    run(VllmAbuse(1, vllm))


def test_random_messages_of_sglang(sglang: Any) -> None:
    run(SglangAbuse(1, sglang))


def test_a_message_without_rows_is_nothing(sglang: Any) -> None:
    meter = Meter()
    SGLangSpecDecInstrumentor().instrument(meter_provider=meter.provider)
    manager = sglang(sglang_stand_in.settings())
    columns: dict[str, list[Any]] = {name: [] for name in sglang_stand_in.COLUMNS}
    manager._handle_batch_output(SimpleNamespace(**columns))
    assert set(meter.totals().values()) == {0}
    assert meter.errors() == {}


def test_an_abort_that_cannot_be_read_is_the_engine_s_own_affair(sglang: Any) -> None:
    meter = Meter()
    SGLangSpecDecInstrumentor().instrument(meter_provider=meter.provider)
    manager = sglang(sglang_stand_in.settings())
    manager.outcome = lambda: "done"
    assert manager._handle_abort_req(Hostile()) == "done"
    assert meter.errors() == {"RuntimeError": 1}
