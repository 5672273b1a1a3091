from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from tests.unit.at_once import Yielding, in_threads, switching_often
from tests.unit.collected import DROPPED, FIELD_OF_METRIC, Meter, counted

ALL = "accept_rate,acceptance_length,tokens_per_verify"


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def recorder(meter: Meter) -> SpecDecRecorder:
    return SpecDecRecorder(meter.provider)


def final(generation: str = "g", /, **fields: Any) -> GenerationReport:
    """A report whose counts are among its keywords; what is not given is unknown."""
    counts = SpecCounts(**{name: fields.pop(name, None) for name in SpecCounts.__dataclass_fields__})
    return GenerationReport(generation, counts, **fields)


def running(generation: str = "g", /, **fields: Any) -> GenerationReport:
    return final(generation, finished=False, **fields)


def whole(accepted: int, proposed: int, verify: int) -> dict[str, int]:
    """All five counts of a generation whose first token came from prefill."""
    emitted = accepted + verify
    return {"accepted": accepted, "proposed": proposed, "verify": verify, "completion": emitted + 1, "emitted": emitted}


# Exactly once


def test_a_final_report_is_counted_and_finishes_its_generation(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(**whole(3, 8, 2)))
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.dropped() == {}


def test_reports_are_cumulative_and_only_their_difference_is_added(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**whole(1, 4, 1)))
    assert meter.totals() == whole(1, 4, 1)
    recorder.record(running(**whole(3, 8, 2)))
    assert meter.totals() == whole(3, 8, 2)
    recorder.record(final(**whole(3, 12, 3)))
    assert meter.totals() == whole(3, 12, 3) | {"generations": 1}
    assert meter.dropped() == {}


def test_a_running_report_with_no_counter_above_the_known_ones_is_late(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**whole(3, 8, 2)))
    for late in (whole(3, 8, 2), whole(1, 4, 1), {"accepted": 3}, {"accepted": 0}, {}):
        recorder.record(running(**late))
    assert meter.totals() == whole(3, 8, 2)
    assert meter.dropped() == {}


def test_a_late_report_is_late_after_the_finish_too(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(**whole(3, 8, 2)))
    for late in (whole(3, 8, 2), whole(1, 4, 1), {"accepted": 3}, {}):
        recorder.record(running(**late))
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.dropped() == {}


@pytest.mark.parametrize("make", [running, final])
def test_some_counters_higher_and_some_lower_is_a_conflict(
    meter: Meter, recorder: SpecDecRecorder, make: Callable[..., GenerationReport]
) -> None:
    recorder.record(running(**whole(3, 8, 2)))
    recorder.record(make(**whole(3, 8, 2) | {"accepted": 2, "completion": 9}))
    assert meter.totals() == whole(3, 8, 2)
    assert meter.dropped() == {"conflict": 1}


def test_a_final_report_with_a_lower_counter_is_a_conflict_and_finishes_nothing(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    recorder.record(running(**whole(3, 8, 2)))
    recorder.record(final(**whole(3, 8, 2) | {"verify": 1}))
    assert meter.totals() == whole(3, 8, 2)
    recorder.record(final(**whole(4, 12, 3)))
    assert meter.totals() == whole(4, 12, 3) | {"generations": 1}
    assert meter.dropped() == {"conflict": 1}


def test_a_final_report_equal_to_the_running_one_finishes_the_generation(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    recorder.record(running(**whole(3, 8, 2)))
    recorder.record(final(**whole(3, 8, 2)))
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.dropped() == {}
    assert meter.pooled().coverage == dict.fromkeys(ALL.split(","), 1.0)


def test_after_the_finish_an_equal_final_report_is_a_duplicate(meter: Meter, recorder: SpecDecRecorder) -> None:
    for _ in range(3):
        recorder.record(final(**whole(3, 8, 2)))
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.dropped() == {"duplicate": 2}


@pytest.mark.parametrize(
    "other",
    [
        final(**whole(4, 8, 2)),
        final(**whole(2, 8, 2)),
        final(**whole(3, 8, 2) | {"emitted": None}),
        final(accepted=3),
        running(**whole(4, 12, 3)),
        running(**whole(3, 8, 2) | {"accepted": 2, "verify": 3}),
    ],
)
def test_anything_else_after_the_finish_is_a_conflict(
    meter: Meter, recorder: SpecDecRecorder, other: GenerationReport
) -> None:
    recorder.record(final(**whole(3, 8, 2)))
    recorder.record(other)
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.dropped() == {"conflict": 1}


def test_unknown_equals_only_unknown_between_final_reports(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=3, proposed=8))
    recorder.record(final(accepted=3, proposed=8))
    recorder.record(final(accepted=3, proposed=8, verify=0))
    recorder.record(final(accepted=3))
    assert meter.dropped() == {"duplicate": 1, "conflict": 2}


def test_unknown_is_not_compared_otherwise(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(accepted=3, proposed=8))
    recorder.record(running(proposed=12, verify=3))  # accepted is neither lower nor higher
    recorder.record(final(accepted=5, verify=3))
    recorder.record(running(accepted=4, completion=99))  # completion was never known
    assert meter.totals() == {"accepted": 5, "proposed": 12, "verify": 3, "generations": 1}
    assert meter.dropped() == {}


def test_what_was_known_before_the_final_report_is_known_after_it(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(accepted=3, verify=2))
    recorder.record(final(verify=2))
    recorder.record(running(accepted=3))
    assert meter.dropped() == {}
    recorder.record(running(accepted=4))
    assert meter.dropped() == {"conflict": 1}


def test_the_same_id_in_another_session_is_another_generation(meter: Meter, recorder: SpecDecRecorder) -> None:
    for session in ("s1", "s2", "", None):
        recorder.record(final(session_id=session, accepted=1, proposed=4))
    assert meter.totals() == {"accepted": 4, "proposed": 16, "generations": 4}
    assert meter.dropped() == {}


def test_two_recorders_remember_apart_and_count_into_the_same_series(meter: Meter) -> None:
    for recorder in (SpecDecRecorder(meter.provider), SpecDecRecorder(meter.provider)):
        recorder.record(final(**whole(3, 8, 2), model="m"))
    assert len(meter.points("specdec.accepted_tokens")) == 1
    assert meter.totals()["generations"] == 2


def test_a_conflict_is_logged_once(meter: Meter, recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture) -> None:
    for generation in ("%s of a hundred %d", "h"):
        recorder.record(final(generation, accepted=1, proposed=4))
        recorder.record(final(generation, accepted=2, proposed=4))
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "%s of a hundred %d" in line.getMessage()
    assert meter.dropped() == {"conflict": 2}


def test_duplicates_and_late_reports_are_not_logged(
    recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    for report in (final(accepted=1), final(accepted=1), running(accepted=1)):
        recorder.record(report)
    assert caplog.records == []


@pytest.mark.parametrize("report", [None, "g", {"generation_id": "g"}, SpecCounts(1, 2), object(), [final()]])
def test_anything_but_a_report_is_invalid_and_does_no_harm(
    meter: Meter, recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture, report: Any
) -> None:
    recorder.record(report)
    recorder.record(report)
    recorder.record(final(accepted=1))
    assert meter.dropped() == {"invalid": 2}
    assert meter.totals() == {"accepted": 1, "generations": 1}
    assert len(caplog.records) == 1


def test_dropped_reports_carry_no_ratio_set_and_no_id(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final("an-id", accepted=1, session_id="a-session"))
    recorder.record(final("an-id", accepted=1, session_id="a-session"))
    (point,) = meter.points(DROPPED)
    assert point.attributes.pop("specdec.process").startswith("recorder-")
    assert point.attributes == {"specdec.reason": "duplicate", "specdec.source": "response"}


# Attributes


def test_the_attributes_of_every_point(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(
        final(
            "an-id",
            **whole(3, 8, 2),
            session_id="a-session",
            sample_id="a-sample",
            model="m",
            provider="sglang",
            method="eagle3",
            engine_index=0,
            accepted_by_position=[2, 1],
            proposed_by_position=[4, 4],
        )
    )
    found = meter.points()
    assert len(found) == 6 + 4
    for point in found:
        assert ("specdec.ratio_set" in point.attributes) == (".position." not in point.name)
        assert ("specdec.position" in point.attributes) == (".position." in point.name)
        common = {k: v for k, v in point.attributes.items() if k not in ("specdec.ratio_set", "specdec.position")}
        assert common.pop("specdec.process").startswith("recorder-")
        assert common == {
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": "m",
            "specdec.method": "eagle3",
            "specdec.source": "response",
            "specdec.engine.index": 0,
        }


def test_an_attribute_that_is_not_known_is_left_out(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=1))
    (point,) = meter.points("specdec.accepted_tokens")
    assert set(point.attributes) == {"specdec.source", "specdec.process", "specdec.ratio_set"}


# Unknown, zero and no generation


def test_unknown_adds_nothing_and_a_reported_zero_adds_its_zero(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=0, proposed=8))
    assert meter.totals() == {"accepted": 0, "proposed": 8, "generations": 1}


def test_a_zero_numerator_over_a_positive_denominator_is_a_real_zero(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=0, proposed=8))
    assert meter.pooled().ratios == {"accept_rate": 0.0}


def test_a_zero_denominator_gives_no_ratio(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=0, proposed=0, verify=0, completion=7, emitted=0))
    pooled = meter.pooled()
    assert pooled.ratios == {}
    assert pooled.coverage == dict.fromkeys(ALL.split(","), 1.0)


@pytest.mark.parametrize("speculation", [None, True])
def test_a_report_with_completion_zero_is_no_generation(meter: Meter, speculation: bool | None) -> None:
    recorder = SpecDecRecorder(meter.provider, speculation=speculation)
    recorder.record(final(accepted=0, proposed=0, verify=0, completion=0, emitted=0))
    recorder.record(final(completion=0))
    recorder.record(final(accepted=1, proposed=4, verify=1, completion=0))
    recorder.record(running(accepted=1, proposed=4, verify=1, completion=0))
    assert meter.points() == []


def test_a_generation_may_begin_after_a_report_with_completion_zero(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(accepted=0, proposed=0, verify=0, completion=0, emitted=0))
    recorder.record(final(**whole(3, 8, 2)))
    assert meter.sets()["generations", ALL] == 1


def test_nothing_known_about_drafts_adds_nothing(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(completion=3))
    recorder.record(final(completion=7, emitted=3))
    recorder.record(final("h"))
    assert meter.points() == []


def test_nothing_known_about_drafts_counts_as_not_covered_where_speculation_is_known_to_be_on(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider, speculation=True)
    recorder.record(final("g", completion=7))
    recorder.record(final("h"))
    recorder.record(final("i", **whole(3, 8, 2)))
    assert meter.sets()["generations", "none"] == 2
    assert meter.sets()["completion", "none"] == 7
    assert meter.pooled().coverage == dict.fromkeys(ALL.split(","), 1 / 3)


def test_drafts_that_become_known_after_reports_that_added_nothing_are_known_from_the_start(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    recorder.record(running(completion=3))
    recorder.record(final(**whole(3, 8, 2)))
    assert meter.sets()["generations", ALL] == 1
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}


def test_speculation_off_gives_not_one_point(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    recorder = SpecDecRecorder(meter.provider, speculation=False)
    recorder.record(final(completion=7))
    recorder.record(final(completion=8))
    recorder.record(final("h", accepted=0, proposed=0, verify=0, completion=7))
    assert caplog.records == []
    recorder.record(final("i", **whole(3, 8, 2)))
    recorder.record(final("j", **whole(3, 8, 2)))
    recorder.record(None)  # type: ignore[arg-type]  # the point of the test
    assert meter.points() == []
    assert len(caplog.records) == 2  # drafts are there after all; and no report


# Ratios are judged on the increment


def test_a_half_that_becomes_known_late_enters_no_ratio(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(proposed=8, verify=2))
    recorder.record(final(accepted=3, proposed=12, verify=3))
    assert meter.sets() == {
        ("proposed", "none"): 12,
        ("verify", "none"): 3,
        ("accepted", "none"): 3,
        ("generations", "none"): 1,
    }


def test_a_half_enters_again_once_it_was_known_at_both_ends(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(accepted=1, proposed=4))
    recorder.record(running(accepted=None, proposed=8))
    recorder.record(running(accepted=3, proposed=12))
    recorder.record(final(accepted=7, proposed=16))
    assert meter.sets() == {
        ("accepted", "accept_rate"): 1 + 4,
        ("proposed", "accept_rate"): 4 + 4,
        ("accepted", "none"): 2,
        ("proposed", "none"): 8,
        ("generations", "none"): 1,
    }
    assert meter.pooled().ratios == {"accept_rate": 5 / 8}


def test_an_increment_is_judged_and_not_the_sum(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(accepted=1, proposed=8))
    recorder.record(final(accepted=6, proposed=9))  # 6 ≤ 9, but 5 > 1
    assert meter.sets() == {
        ("accepted", "accept_rate"): 1,
        ("proposed", "accept_rate"): 8,
        ("accepted", "none"): 5,
        ("proposed", "none"): 1,
        ("generations", "none"): 1,
    }


def test_what_a_generation_adds_at_once_is_added_under_one_set(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=5, proposed=4, verify=1, completion=6, emitted=6))
    assert meter.sets() == {
        ("accepted", "none"): 5,
        ("proposed", "none"): 4,
        ("verify", "acceptance_length,tokens_per_verify"): 1,
        ("completion", "tokens_per_verify"): 6,
        ("emitted", "acceptance_length"): 6,
        ("generations", "acceptance_length,tokens_per_verify"): 1,
    }


def test_what_was_added_never_moves(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**whole(3, 8, 2)))
    before = meter.sets()
    recorder.record(final(**whole(3, 8, 2) | {"accepted": 9}))  # 6 accepted of 0 proposed, in 0 steps
    assert {key: value for key, value in meter.sets().items() if key in before} == before
    assert meter.sets()["generations", "acceptance_length,tokens_per_verify"] == 1


def test_a_generation_is_covered_by_the_ratios_that_held_in_every_increment(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    recorder.record(running(accepted=5, proposed=4, verify=1, completion=7, emitted=6))
    recorder.record(running(accepted=6, proposed=8, verify=2, completion=9, emitted=10))
    recorder.record(final(accepted=7, proposed=12, verify=3, completion=11, emitted=12))
    assert meter.sets()["generations", "tokens_per_verify"] == 1
    assert meter.totals() == {
        "accepted": 7,
        "proposed": 12,
        "verify": 3,
        "completion": 11,
        "emitted": 12,
        "generations": 1,
    }


def test_a_count_that_the_final_report_does_not_know_keeps_what_was_added(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    recorder.record(running(**whole(3, 8, 2)))
    recorder.record(final(verify=2))
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.sets()["generations", "none"] == 1


# Positions


def positions(accepted: list[int] | None, proposed: list[int] | None, **fields: Any) -> dict[str, Any]:
    return {"accepted_by_position": accepted, "proposed_by_position": proposed, "verify": 4} | fields


def test_positions_are_cumulative_too(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**positions([1, 0], [1, 1], verify=1)))
    recorder.record(final(**positions([3, 1, 0], [4, 4, 1])))
    recorder.record(final(**positions([3, 1, 0], [4, 4, 1])))
    assert meter.at_positions() == ([3, 1, 0], [4, 4, 1])
    assert meter.pooled().accept_rate_by_position == {0: 3 / 4, 1: 1 / 4, 2: 0.0}


@pytest.mark.parametrize(
    ("accepted", "proposed"),
    [
        ([1], None),
        (None, [1]),
        ([1, 1], [4]),
        ([1], [4, 4]),
        ([5, 1], [4, 4]),
        ([1, 5], [4, 4]),
    ],
)
def test_positions_count_only_where_both_halves_are_known_and_consistent(
    meter: Meter, recorder: SpecDecRecorder, accepted: list[int] | None, proposed: list[int] | None
) -> None:
    recorder.record(final(**positions(accepted, proposed)))
    assert meter.at_positions() == ([], [])
    assert meter.totals() == {"verify": 4, "generations": 1}


def test_positions_never_go_down(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**positions([3, 1], [4, 4])))
    for verify, accepted, proposed in ((5, [2, 1], [5, 5]), (6, [3], [5]), (7, [3, 1], [4, 3])):
        recorder.record(running(**positions(accepted, proposed, verify=verify)))
        assert meter.at_positions() == ([3, 1], [4, 4])


def test_positions_are_counted_from_where_they_were_last_known(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**positions([1, 0], [2, 2], verify=2)))
    recorder.record(running(**positions(None, None, verify=3)))
    recorder.record(final(**positions([3, 1], [4, 4], verify=4)))
    assert meter.at_positions() == ([3, 1], [4, 4])


def test_positions_beyond_the_last_have_no_series(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(**positions(list(range(40, 0, -1)), [50] * 40)))
    accepted, proposed = meter.at_positions()
    assert accepted == list(range(40, 8, -1))
    assert proposed == [50] * 32


# Memory


def test_the_memory_for_finished_generations_is_a_window(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider, remembered=2)
    for generation in "abc":
        recorder.record(final(generation, verify=1))
    recorder.record(final("b", verify=1))
    recorder.record(final("c", verify=1))
    assert meter.dropped() == {"duplicate": 2}
    recorder.record(final("a", verify=1))  # forgotten, so it counts anew
    assert meter.totals() == {"verify": 4, "generations": 4}


def test_the_memory_for_running_generations_is_bounded_and_says_so_once(
    meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = SpecDecRecorder(meter.provider, remembered=2)
    for generation, verify in (("a", 1), ("b", 1), ("a", 2)):
        recorder.record(running(generation, verify=verify))
    assert caplog.records == []
    recorder.record(running("c", verify=1))  # b was silent longest, and is forgotten
    assert "Raise `remembered`" in caplog.text
    recorder.record(final("a", verify=5))
    assert meter.totals() == {"verify": 5 + 1 + 1, "generations": 1}
    recorder.record(running("b", verify=2))
    assert meter.totals() == {"verify": 5 + 1 + 1 + 2, "generations": 1}
    recorder.record(running("d", verify=1))
    assert len(caplog.records) == 1


def test_memory_does_not_grow_with_the_number_of_generations(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider, remembered=10)
    reports = [make(str(n), verify=1) for n in range(1000) for make in (running, final)]
    for report in reports[:200]:
        recorder.record(report)
    before = number_of_objects()
    for report in reports[200:]:
        recorder.record(report)
    assert number_of_objects() - before < 100


def number_of_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("remembered", [0, -1])
def test_the_window_is_positive(remembered: int) -> None:
    with pytest.raises(ValueError, match="remembered"):
        SpecDecRecorder(remembered=remembered)


# Threads


def test_the_same_reports_from_many_threads_are_counted_once(meter: Meter, recorder: SpecDecRecorder) -> None:
    def work(_: int) -> None:
        for generation in map(Yielding, range(20)):
            recorder.record(running(generation, **whole(1, 4, 1)))
            recorder.record(final(generation, **whole(3, 8, 2)))

    in_threads(work)
    assert meter.totals() == {field: 20 * value for field, value in whole(3, 8, 2).items()} | {"generations": 20}
    assert meter.dropped() == {"duplicate": 31 * 20}


def test_other_generations_from_many_threads_are_all_counted(meter: Meter, recorder: SpecDecRecorder) -> None:
    done = threading.Event()

    def work(number: int) -> None:
        for n in range(20):
            recorder.record(running(f"{number}-{n}", **whole(1, 4, 1)))
            recorder.record(final(f"{number}-{n}", **whole(3, 8, 2)))

    def collect() -> None:
        while not done.is_set():
            meter.totals()

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        in_threads(work)
    finally:
        done.set()
        collector.join(timeout=30)
    assert meter.totals() == {field: 640 * value for field, value in whole(3, 8, 2).items()} | {"generations": 640}
    assert meter.dropped() == {}


def test_a_collection_sees_each_report_whole_or_not_at_all(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final("first", **whole(1, 2, 1)))
    seen: list[dict[str, int]] = []
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            seen.append(meter.totals())

    collector = threading.Thread(target=collect)
    with switching_often():
        collector.start()
        try:
            for n in range(300):
                recorder.record(final(str(n), **whole(1, 2, 1)))
        finally:
            done.set()
            collector.join(timeout=30)
    for totals in seen:
        n = totals["generations"]
        assert totals == {field: n * value for field, value in whole(1, 2, 1).items()} | {"generations": n}


# What stays in the process


def test_nothing_but_a_report_makes_a_point(meter: Meter) -> None:
    SpecDecRecorder(meter.provider)
    assert meter.points() == []


def test_a_recorder_that_is_gone_leaves_its_counts(meter: Meter) -> None:
    SpecDecRecorder(meter.provider).record(final(**whole(3, 8, 2)))
    gc.collect()
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}


def test_every_counter_of_a_report_is_there_even_where_it_is_zero(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(accepted=0, proposed=0, verify=0, completion=1, emitted=0))
    assert meter.totals() == counted(completion=1, generations=1)
    assert {point.name for point in meter.points()} == set(FIELD_OF_METRIC)
