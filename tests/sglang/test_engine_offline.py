"""The real offline `sglang.Engine` in this process, with forced retractions: counters against answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from examples.vllm_demo.tiny_model import Models
from otel_specdec import SGLangSpecDecInstrumentor
from tests.sglang.serving import CPU, GREEDY, KERNELS, KNOWN, SETTINGS, told
from tests.unit.collected import Meter


class Offline:
    def __init__(self, engine: Any, meter: Meter) -> None:
        self.engine = engine
        self.meter = meter

    def grown(self, answers: Any, before: dict[str, int]) -> None:
        answers = answers if isinstance(answers, list) else [answers]
        totals = self.meter.totals()
        assert {name: totals[name] - before[name] for name in totals} == told(answers)


@pytest.fixture(scope="module")
def offline(models: Models) -> Iterator[Offline]:
    with pytest.MonkeyPatch.context() as patch:
        # The engine's own processes inherit these; the plugin of ours in them is switched off.
        for name, value in {**CPU, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(KERNELS))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(KERNELS), str(KERNELS.parents[2])]))
        patch.setenv("OMP_NUM_THREADS", "1")
        meter = Meter(resource={"service.instance.id": "here"})
        SGLangSpecDecInstrumentor().instrument(meter_provider=meter.provider)
        import sglang

        engine = sglang.Engine(model_path=str(models.target), served_model_name="tiny", log_level="warning", **SETTINGS)
        try:
            yield Offline(engine, meter)
        finally:
            engine.shutdown()
            SGLangSpecDecInstrumentor().uninstrument()


def test_series_begin_at_zero_when_the_engine_is_there(offline: Offline) -> None:
    assert offline.meter.totals() == {"accepted": 0, "verify": 0, "completion": 0, "emitted": 0, "generations": 0}


def test_forced_retractions_of_a_batch(offline: Offline) -> None:
    before = offline.meter.totals()
    answers = offline.engine.generate([KNOWN, "the cat", "12", "xyz"], {**GREEDY, "max_new_tokens": 60})
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    offline.grown(answers, before)


def test_a_stream_is_counted_while_it_runs(offline: Offline) -> None:
    before = offline.meter.totals()
    seen = []
    last = None
    for last in offline.engine.generate(KNOWN, {**GREEDY, "max_new_tokens": 60}, stream=True):
        totals = offline.meter.totals()
        assert totals["completion"] - before["completion"] >= last["meta_info"]["completion_tokens"]
        seen.append(totals["emitted"])
    assert seen == sorted(seen)  # never lower, whatever was retracted
    assert len(set(seen)) > 5
    offline.grown(last, before)


def test_several_sequences_and_ids_of_the_callers_own(offline: Offline) -> None:
    before = offline.meter.totals()
    answers = offline.engine.generate(KNOWN, {**GREEDY, "max_new_tokens": 40, "n": 2})
    answers += offline.engine.generate(["ab", "cd"], {**GREEDY, "max_new_tokens": 30}, rid=["r0", "r1"])
    assert [answer["meta_info"]["id"] for answer in answers[2:]] == ["r0", "r1"]
    offline.grown(answers, before)


def test_an_abort_while_it_runs(offline: Offline) -> None:
    before = offline.meter.totals()

    async def abort() -> Any:
        stream = await offline.engine.async_generate(
            KNOWN, {**GREEDY, "max_new_tokens": 300}, stream=True, rid="abort-me"
        )
        number = 0
        async for part in stream:
            number += 1
            if number == 5:
                offline.engine.tokenizer_manager.abort_request(rid="abort-me")
            last = part
        return last

    last = offline.engine.loop.run_until_complete(abort())
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    offline.grown(last, before)


def test_nothing_is_remembered_when_all_are_done(offline: Offline) -> None:
    offline.meter.totals()
    (tally,) = offline.engine.tokenizer_manager._otel_specdec_watch._tallies.values()
    assert tally._live == tally._lives == {}
    assert offline.meter.errors() == {}
