"""Input that nobody should send: it costs bounded memory, breaks no export, and takes no text along.

What bounds the series and the labels is a rule of the pool and of the labels, whatever the input; the seeds are fixed.
A million of each, instead of what is here: tests/benchmarks/million.py.
"""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from otel_specdec import (
    GenerationExemplarFilter,
    GenerationReport,
    SpecCounts,
    SpecDecRecorder,
    StreamedResponse,
    views,
)
from otel_specdec.counts import COUNT_FIELDS, LARGEST, LONGEST_LABEL
from otel_specdec.sums import MAX_ATTRIBUTE_SETS, pool_for
from tests.unit import recorded
from tests.unit.at_once import in_threads
from tests.unit.collected import Meter, counted
from tests.unit.engine_stand_in import HandTally, description
from tests.unit.test_names import LABELS

CONTROL = "".join(map(chr, (*range(32), 127, 0x85, 0x2028, 0x202E, 0xFEFF, 0xFFFF)))
LONE = "\ud800 \udfff"
TEXTS = {
    "a megabyte": "x" * 1_000_000,
    "control characters": CONTROL,
    "half a surrogate pair": LONE,
    "the other half": "\udc00",
    "nul": "\0",
    "not ASCII": "é漢\U0001f600" * 40,
    "looks like a label": 'id="1",gen_ai.request.model="m"} 7\n# HELP',
    "a digest's length": "x" * 15,
}


@pytest.fixture
def meter() -> Meter:
    return Meter(views=views(), exemplar_filter=GenerationExemplarFilter())


@pytest.fixture
def recorder(meter: Meter) -> SpecDecRecorder:
    return SpecDecRecorder(meter.provider)


def report(generation: str = "g", **fields: Any) -> GenerationReport:
    counts = fields.pop("counts", SpecCounts(3, 8, 2, 6, 5))
    return GenerationReport(generation, counts, **fields)


def exported(meter: Meter) -> bytes:
    """A collection as it goes over the wire; fails where the exporter would."""
    data = meter.reader.get_metrics_data()
    assert data is not None
    return encode_metrics(data).SerializeToString()


# Texts


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_id_is_one_generation_and_never_an_attribute(
    meter: Meter, recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    for _ in range(2):
        for session in (None, text):
            recorder.record(report(text, session_id=session, sample_id=text))
    recorder.record_batch([report(text, session_id="s", sample_id=text)] * 3)
    sent = exported(meter)
    assert meter.totals() == counted(accepted=9, proposed=24, verify=6, completion=18, emitted=15, generations=3)
    assert meter.dropped() == {"duplicate": 4}
    assert len(sent) < 20_000
    assert caplog.records == []  # no exporter complains of an exemplar either
    for point in meter.points():
        assert text not in map(str, point.attributes.values())


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("field", ["model", "provider", "method"])
def test_any_name_is_counted_and_exported(
    meter: Meter, recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture, field: str, text: str
) -> None:
    named: dict[str, Any] = {field: text}
    recorder.record(report(accepted_by_position=[2, 1], proposed_by_position=[2, 2], **named))
    assert len(exported(meter)) < 20_000
    assert meter.totals() == counted(accepted=3, proposed=8, verify=2, completion=6, emitted=5, generations=1)
    assert meter.at_positions() == ([2, 1], [2, 2])
    assert caplog.records == []
    for point in meter.points():
        assert all(len(value) <= LONGEST_LABEL for value in point.attributes.values() if isinstance(value, str))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_in_a_payload_is_counted_and_exported(meter: Meter, recorder: SpecDecRecorder, text: str) -> None:
    answer = {"id": text, "model": text, "meta_info": {"finish_reason": {"type": text}}, "spec_verify_ct": 2}
    recorder.record_payload(answer, session_id=text)
    recorder.record_payload({**answer, text: text})
    assert len(exported(meter)) < 20_000
    assert meter.totals()["verify"] == 4


# Counts


def repr_of(value: Any) -> str:
    return repr(value) if not isinstance(value, int) or abs(value) < 2**80 else "a number of 5,000 digits"


@pytest.mark.parametrize(
    "bad", [-1, -(2**70), 2**63, 2**70, 10**5000, True, False, 1.0, float("nan"), "7", b"7", [7]], ids=repr_of
)
def test_what_is_no_count_is_unknown_in_a_payload_and_refused_in_a_report(
    meter: Meter, recorder: SpecDecRecorder, bad: Any
) -> None:
    recorder.record_payload({"id": "g", "spec_verify_ct": bad, "spec_num_correct_drafts": 1, "completion_tokens": 3})
    assert "verify" not in meter.totals()
    for field in COUNT_FIELDS:
        with pytest.raises((TypeError, ValueError), match=field):
            SpecCounts(**{field: bad})


def test_a_sum_that_no_exporter_can_carry_is_an_error_and_every_export_goes_on(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    huge = SpecCounts(1, LARGEST, 1, 2, 2)
    recorder.record(report("a", counts=huge))
    assert exported(meter)
    for generation in ("b", "c"):
        recorder.record(report(generation, counts=huge))
    assert exported(meter)
    totals = meter.totals()
    assert totals == counted(accepted=3, proposed=LARGEST, verify=3, completion=6, emitted=6, generations=3)
    assert meter.errors().keys() == {"OverflowError"}
    recorder.record(report("d", counts=SpecCounts(1, 0, 1, 2, 2)))
    assert meter.totals()["verify"] == 4
    assert exported(meter)


def test_positions_of_any_length_are_read_as_far_as_there_are_series(meter: Meter, recorder: SpecDecRecorder) -> None:
    for number in (1, 2):
        ones = [number] * 200_000
        recorder.record(report(accepted_by_position=ones, proposed_by_position=ones, finished=number == 2,
                               counts=SpecCounts(number, number, number, number, number)))  # fmt: skip
    assert meter.at_positions() == ([2] * 32, [2] * 32)
    assert meter.totals()["generations"] == 1


# Many of them

MANY = 20_000


@pytest.mark.parametrize("field", ["model", "provider", "method", "engine_index"])
@pytest.mark.parametrize("at_once", [True, False], ids=["in one batch", "one by one"])
def test_however_many_names_there_are_the_series_are_bounded_and_the_rest_is_in_the_overflow(
    field: str, at_once: bool
) -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    number = MANY if at_once else MANY // 4

    def made() -> Iterator[GenerationReport]:
        for n in range(number):
            name: dict[str, Any] = {field: n if field == "engine_index" else f"{field} {n}"}
            yield report(str(n), counts=SpecCounts(1, 2, 1, 3, 2), **name)

    if at_once:
        recorder.record_batch(made())
    else:
        for each in made():
            recorder.record(each)
    assert len(recorder._sums._pending) <= 6 * MAX_ATTRIBUTE_SETS  # before anybody has collected too
    found = meter.points()
    by_metric = Counter(point.name for point in found)
    assert set(by_metric.values()) == {MAX_ATTRIBUTE_SETS}
    assert meter.totals() == {
        name: number * value
        for name, value in counted(accepted=1, proposed=2, verify=1, completion=3, emitted=2, generations=1).items()
    }
    (overflow,) = [
        p for p in found if p.name == "specdec.generations" and p.attributes == {"otel.metric.overflow": True}
    ]
    assert overflow.value == number - (MAX_ATTRIBUTE_SETS - 1)


def test_however_many_ids_there_are_the_series_stay_and_so_does_the_memory() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, remembered=1_000)

    def some(start: int) -> int:
        for n in range(start, start + MANY):
            recorder.record(report(f"chatcmpl-{n:032x}", session_id=f"s{n}", sample_id=f"t{n}", finished=n % 3 > 0))
        tracemalloc.start()
        try:
            meter.points()
            return len(recorder._running) + len(recorder._finished) + len(recorder._sums._by_identity)
        finally:
            tracemalloc.stop()

    kept = [some(start) for start in (0, MANY, 2 * MANY)]
    assert max(kept) <= 2 * (1_000 + 1_000 // 64) + 68
    assert len(meter.points()) == 6
    assert meter.totals()["verify"] == 3 * MANY * 2


def test_an_engine_that_invents_ratios_for_every_step_has_eight_sets_and_no_more(meter: Meter) -> None:
    from otel_specdec.instrumentors import EngineCounters

    draw = random.Random(5)
    tally = HandTally()
    EngineCounters(meter.provider, logging.getLogger("test")).engine_started(description(), tally, lambda: True)
    for _ in range(2_000):
        tally.put(*(draw.choice([None, 0, draw.randrange(10)]) for _ in COUNT_FIELDS), generations=1)
    meter.points()
    sets = {point.attributes["specdec.ratio_set"] for point in meter.points("specdec.generations")}
    assert len(sets) <= 8
    assert meter.totals()["generations"] == 2_000


# Order


def test_reports_out_of_order_from_32_threads_come_out_exactly() -> None:
    """Each thread hands over all reports of all generations, shuffled in its own way: the truth is each one's last."""
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    draw = random.Random(32)
    lives: list[list[GenerationReport]] = []
    for n in range(60):
        sums = [0] * 5
        life = []
        for _ in range(draw.randint(1, 6)):
            accepted, proposed = draw.randint(0, 4), 4
            step = (accepted, proposed, 1, accepted + 2, accepted + 1)
            sums = [a + b for a, b in zip(sums, step, strict=True)]
            life.append(report(f"g{n % 40}", session_id=f"s{n // 40}", counts=SpecCounts(*sums), finished=False))
        lives.append([*life[:-1], replace(life[-1], finished=True)])
    everything = [each for life in lives for each in life]

    def work(number: int) -> None:
        mine = random.Random(number).sample(everything, len(everything))
        if number % 2:
            for each in mine:
                recorder.record(each)
        else:
            for start in range(0, len(mine), 7):
                recorder.record_batch(mine[start : start + 7])

    in_threads(work)
    expected = {name: sum(getattr(life[-1].counts, name) for life in lives) for name in COUNT_FIELDS}
    assert meter.totals() == expected | {"generations": len(lives)}
    # Each thread had each final report: one of them was counted, and none contradicts another.
    assert meter.dropped() == {"duplicate": 31 * len(lives)}
    assert meter.errors() == {}


# No text

CANARY = "canary-7f3a: the prompt or the answer"
READ = {"id", "object", "model", "type", "finish_reason", "request_id", "rid"}
"""Names whose texts are read: ids go into exemplars, the model is a label, the others are only compared."""


def with_canaries(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        found = {each: with_canaries(inner, each) for each, inner in value.items()}
        return found | {CANARY: CANARY, "prompt": CANARY, "text": CANARY, "messages": [{"content": CANARY}]}
    if isinstance(value, list):
        return [with_canaries(each, name) for each in value]
    return CANARY + value if isinstance(value, str) and name not in READ else value


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_text_of_a_response_is_in_any_exported_byte_or_in_a_log(
    meter: Meter, recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    caplog.set_level(logging.DEBUG)
    for case in recorded.recorded(engine).values():
        if "chunks" in case:
            stream = StreamedResponse()
            for chunk in case["chunks"]:
                stream.add(with_canaries(chunk))
            recorder.record_payload(stream.payload)
        else:
            recorder.record_payload(with_canaries(case["response"]))
            renamed = {CANARY: CANARY, "spec_accepted_things": CANARY, "id": "r", "text": CANARY, "spec_verify_ct": 1}
            recorder.record_payload(renamed)
        recorder.record_payload(CANARY)
        recorder.record_payload([CANARY, CANARY.encode()])
        recorder.record(CANARY)  # type: ignore[arg-type]  # whatever somebody hands over
        recorder.record_batch([CANARY])  # type: ignore[list-item]  # the same
        sent = exported(meter)
        assert b"canary" not in sent
        assert b"specdec.verify_steps" in sent
    pool_for(meter.provider).error(ValueError(CANARY), "testing")
    assert b"canary" not in exported(meter)
    assert meter.errors() == {"ValueError": 1}
    assert "canary" not in "".join(record.getMessage() for record in caplog.records)


def test_every_attribute_of_every_point_is_one_of_the_documented_labels(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    for engine in ("vllm", "sglang"):
        for case in recorded.recorded(engine).values():
            recorder.record_payload(with_canaries(recorded.payload_of(case)), method="ngram", engine_index=3)
    recorder.record(report(accepted_by_position=[1], proposed_by_position=[1]))
    recorder.record_payload(CANARY)
    pool_for(meter.provider).error(ValueError(CANARY), "testing")
    found = {name for point in meter.points() for name in point.attributes}
    assert found <= LABELS
    assert found >= {"specdec.position", "specdec.reason", "error.type"}
