"""`record_batch`: each generation once, and a summary that ranks can be merged by."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_specdec import BatchSummary, GenerationReport, SpecCounts, SpecDecRecorder, pool
from otel_specdec.batches import ascending
from otel_specdec.counts import COUNT_FIELDS
from otel_specdec.names import Metric
from otel_specdec.sums import Series, pool_for
from tests.unit.collected import Meter
from tests.unit.test_recorder_cases import report

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "batches.json").read_text())


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def recorder(meter: Meter) -> SpecDecRecorder:
    return SpecDecRecorder(meter.provider)


def final(generation: str = "g", **fields: Any) -> GenerationReport:
    counts = SpecCounts(**{name: fields.pop(name, None) for name in COUNT_FIELDS})
    return GenerationReport(generation, counts, **fields)


def running(generation: str = "g", **fields: Any) -> GenerationReport:
    return final(generation, finished=False, **fields)


def whole(accepted: int, proposed: int, verify: int) -> dict[str, Any]:
    """All five counts of a generation whose first token came from prefill."""
    emitted = accepted + verify
    return {"accepted": accepted, "proposed": proposed, "verify": verify, "completion": emitted + 1, "emitted": emitted}


# Handed cases


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dedupe", ["window", "batch"])
@pytest.mark.parametrize("order", ["given", "reversed"])
def test_a_handed_case_comes_out_as_told(name: str, dedupe: str, order: str) -> None:
    case = CASES[name]
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=case.get("speculation_enabled"))
    reports = [report(record) for record in case["records"]]
    summary = recorder.record_batch(reports if order == "given" else reports[::-1], dedupe=dedupe)
    assert summary.reports == len(reports)
    expect = dict(case["expect"])
    if expect.pop("emits", None) == "nothing":
        assert meter.points() == []
        assert (summary.totals, summary.ratios, summary.coverage, summary.generations) == ({}, {}, {}, 0)
        return
    pooled, dropped = meter.pooled(), meter.dropped()
    for field in COUNT_FIELDS:
        if field in expect:
            assert pooled.totals[field] == summary.totals[field] == expect.pop(field)
    assert pooled.generations == summary.generations == expect.pop("generations", summary.generations)
    assert dropped.get("duplicate", 0) == summary.duplicates == expect.pop("duplicates", 0)
    assert summary.conflicts == expect.pop("conflicts", 0)
    assert expect.pop("records", summary.reports) == summary.reports
    for ratio, coverage in expect.pop("coverage", {}).items():
        assert pooled.coverage[ratio] == summary.coverage[ratio] == pytest.approx(coverage)
    assert {ratio: summary.ratios[ratio] for ratio in expect} == pytest.approx(expect)
    assert pooled.ratios == pytest.approx(summary.ratios)
    assert summary.ratios.keys() == pooled.ratios.keys()


def test_an_identity_in_conflict_is_left_out_whole_and_each_of_its_reports_counts_once() -> None:
    case = CASES["conflict-left-out-whole"]
    meter = Meter()
    SpecDecRecorder(meter.provider).record_batch(map(report, case["records"]))
    assert meter.totals() == {"accepted": 2, "proposed": 4, "generations": 1}
    assert meter.dropped() == {"conflict": 2}


# Within a batch


def test_a_batch_may_come_in_any_order(meter: Meter) -> None:
    reports = [
        running(**whole(1, 4, 1)),
        running(**whole(3, 8, 2)),
        final(**whole(3, 12, 3)),
        final(**whole(3, 12, 3)),
        final("h", **whole(0, 4, 1)),
    ]
    expected = SpecDecRecorder(Meter().provider).record_batch(reports)
    for order in itertools.permutations(reports):
        meter = Meter()
        assert SpecDecRecorder(meter.provider).record_batch(order) == expected
        assert meter.totals() == {**expected.totals, "generations": 2}
        assert meter.dropped() == {"duplicate": 1}


@pytest.mark.parametrize(
    "reports",
    [
        [final(accepted=1, proposed=4), final(accepted=2, proposed=4)],
        [final(accepted=1, proposed=4), final(accepted=1, proposed=4, verify=1)],  # unknown equals only unknown
        [final(completion=4), final(accepted=1, completion=4)],
        [running(accepted=1, verify=2), running(accepted=2, verify=1)],  # some higher, some lower
        [running(accepted=2, proposed=4), final(accepted=1, proposed=4)],  # a final report with a lower count
        [running(accepted=5), running(accepted=3, proposed=8), final(accepted=4, proposed=8)],
        # each pair of them agrees, all three together do not
        [running(accepted=1, verify=2), running(verify=1, completion=6), running(completion=5, accepted=2)],
    ],
)
def test_reports_that_contradict_each_other_are_left_out_in_any_order(reports: list[GenerationReport]) -> None:
    for order in itertools.permutations(reports):
        meter = Meter()
        summary = SpecDecRecorder(meter.provider).record_batch([*order, final("h", accepted=1, proposed=2)])
        assert (summary.conflicts, summary.duplicates, summary.generations) == (1, 0, 1)
        assert summary.totals == {"accepted": 1, "proposed": 2}
        assert meter.totals() == {"accepted": 1, "proposed": 2, "generations": 1}
        assert meter.dropped() == {"conflict": len(reports)}


def test_duplicates_of_an_identity_in_conflict_are_conflicts(meter: Meter, recorder: SpecDecRecorder) -> None:
    summary = recorder.record_batch([final(accepted=1), final(accepted=1), final(accepted=2), running(accepted=1)])
    assert (summary.conflicts, summary.duplicates, summary.reports) == (1, 0, 4)
    assert meter.dropped() == {"conflict": 4}


def test_running_reports_that_say_the_same_are_late_and_not_dropped(meter: Meter, recorder: SpecDecRecorder) -> None:
    summary = recorder.record_batch([running(**whole(1, 4, 1))] * 3 + [final(**whole(3, 8, 2))])
    assert summary.duplicates == 0
    assert meter.dropped() == {}
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}


def test_a_generation_that_still_runs_is_in_the_totals_and_not_among_the_generations(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    summary = recorder.record_batch([running(**whole(1, 4, 1)), final("h", **whole(3, 8, 2))])
    assert summary.generations == 1
    assert summary.totals["accepted"] == 4
    assert meter.totals() == {**summary.totals, "generations": 1}


def test_attempts_without_a_token_contradict_nobody_not_even_each_other(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    summary = recorder.record_batch(
        [final(completion=0), final(completion=0, emitted=0), final(verify=0, completion=0)]
    )
    assert (summary.generations, summary.conflicts, summary.reports) == (0, 0, 3)
    assert meter.points() == []


def test_an_end_without_a_token_contradicts_the_running_reports_that_had_some(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    summary = recorder.record_batch([final(verify=0, completion=0), running(verify=1, completion=3)])
    assert (summary.generations, summary.conflicts) == (0, 1)
    assert meter.dropped() == {"conflict": 2}


def test_an_attempt_without_a_token_is_no_generation_beside_the_one_that_was(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    aborted = final(accepted=0, proposed=0, verify=0, completion=0)
    for order in (
        [aborted, final(**whole(3, 8, 2))],
        [final("h", **whole(3, 8, 2)), dataclasses.replace(aborted, generation_id="h")],
    ):
        summary = recorder.record_batch(order)
        assert (summary.generations, summary.conflicts, summary.duplicates) == (1, 0, 0)
    assert recorder.record_batch([dataclasses.replace(aborted, generation_id="i")] * 2).generations == 0
    assert meter.totals()["generations"] == 2
    assert meter.dropped() == {}


def test_what_a_batch_adds_is_judged_on_its_increments(meter: Meter, recorder: SpecDecRecorder) -> None:
    summary = recorder.record_batch([running(accepted=1, proposed=8), final(accepted=6, proposed=9)])
    assert summary.totals == {"accepted": 6, "proposed": 9}
    assert summary.ratios == {"accept_rate": 1 / 8}
    assert summary.coverage["accept_rate"] == 0.0
    assert meter.pooled().ratios == summary.ratios


def test_the_reports_of_a_batch_keep_their_attributes_and_positions(meter: Meter, recorder: SpecDecRecorder) -> None:
    for model in ("a", "b"):
        recorder.record_batch(
            final(str(n), **whole(2, 4, 2), model=model, provider="vllm", session_id=model,
                  accepted_by_position=[1, 1], proposed_by_position=[2, 2])
            for n in range(3)
        )  # fmt: skip
    accepted = meter.points("specdec.accepted_tokens")
    assert {point.attributes["gen_ai.request.model"]: point.value for point in accepted} == {"a": 6, "b": 6}
    assert {point.attributes["specdec.source"] for point in meter.points()} == {"response"}
    assert meter.at_positions() == ([6, 6], [12, 12])


def test_anything_but_a_report_is_invalid_and_the_rest_is_counted(
    meter: Meter, recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    mixed: list[Any] = [None, final(accepted=1, proposed=2), {"accepted": 1}, 7]
    summary = recorder.record_batch(mixed)
    assert (summary.reports, summary.generations) == (1, 1)
    assert meter.dropped() == {"invalid": 3}
    assert len(caplog.records) == 1


def test_an_empty_batch_is_a_summary_of_nothing(meter: Meter, recorder: SpecDecRecorder) -> None:
    summary = recorder.record_batch([])
    assert (summary.totals, summary.ratios, summary.coverage, summary.per_sample_means()) == ({}, {}, {}, {})
    assert (summary.generations, summary.reports, summary.duplicates, summary.conflicts) == (0, 0, 0, 0)
    assert meter.points() == []
    other = recorder.record_batch([final(**whole(3, 8, 2))])
    assert summary.merge(other) == other.merge(summary) == other


def test_where_nothing_speculates_a_summary_says_so(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=False)
    summary = recorder.record_batch([final(completion=7), final(completion=7)])
    assert (summary.reports, summary.generations, summary.totals, summary.samples) == (2, 0, {}, 0)
    assert caplog.records == []
    recorder.record_batch([final(**whole(3, 8, 2))])
    assert len(caplog.records) == 1
    assert meter.points() == []


# Across calls


def test_a_batch_that_is_handed_over_twice_counts_once(meter: Meter, recorder: SpecDecRecorder) -> None:
    batch = [running("g", **whole(1, 4, 1)), final("g", **whole(3, 8, 2)), final("h", **whole(0, 4, 1))]
    first = recorder.record_batch(batch)
    assert recorder.record_batch(batch) == first  # it describes its batch alone
    assert meter.totals() == {**first.totals, "generations": 2}
    assert meter.dropped() == {"duplicate": 2}


@pytest.mark.parametrize(
    "batch",
    [
        [final(accepted=2, proposed=4)],
        [final(accepted=2, proposed=4), final(accepted=2, proposed=4)],
        [running(accepted=1, proposed=3), final(accepted=2, proposed=4)],
        [running(accepted=2, proposed=4)],
    ],
)
def test_a_conflict_with_an_earlier_call_leaves_the_earlier_values(
    meter: Meter, recorder: SpecDecRecorder, batch: list[GenerationReport]
) -> None:
    recorder.record_batch([final(accepted=1, proposed=3)])
    summary = recorder.record_batch([*batch, final("h", accepted=5, proposed=9)])
    assert summary.conflicts == 0
    assert summary.totals == {"accepted": 7, "proposed": 13}
    assert meter.totals() == {"accepted": 6, "proposed": 12, "generations": 2}
    assert meter.dropped() == {"conflict": len(batch)}


def test_an_identity_in_conflict_with_what_runs_is_left_out_whole(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(accepted=3, verify=3))
    recorder.record_batch([running(accepted=4), final(accepted=5, verify=2)])  # the first alone would be all right
    assert meter.totals() == {"accepted": 3, "verify": 3}
    assert meter.dropped() == {"conflict": 2}
    recorder.record(final(accepted=5, verify=3))
    assert meter.totals() == {"accepted": 5, "verify": 3, "generations": 1}


def test_a_batch_goes_on_from_what_was_reported_before(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(running(**whole(1, 4, 1)))
    summary = recorder.record_batch([final(**whole(3, 8, 2)), running(**whole(1, 4, 1))])
    assert summary.totals == whole(3, 8, 2)
    assert meter.totals() == whole(3, 8, 2) | {"generations": 1}
    assert meter.dropped() == {}
    recorder.record(final(**whole(3, 8, 2)))
    assert meter.dropped() == {"duplicate": 1}


def test_the_window_is_bounded_and_what_falls_out_counts_anew(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider, remembered=2)
    batch = [final(each, verify=1) for each in "abcd"]
    recorder.record_batch(batch)
    recorder.record_batch(batch)  # a and b are forgotten, and push out c and d before their turn
    assert meter.totals()["generations"] > 4
    recorder.record_batch([final("d", verify=1)])
    assert meter.dropped()["duplicate"] >= 1
    assert len(recorder._finished) == 2


def test_dedupe_in_the_batch_alone_remembers_nothing(meter: Meter, recorder: SpecDecRecorder) -> None:
    recorder.record(final(verify=1))
    for _ in range(2):
        summary = recorder.record_batch([final(verify=2), final(verify=2)], dedupe="batch")
        assert (summary.generations, summary.duplicates) == (1, 1)
    recorder.record(final(verify=1))  # the window is as it was before
    assert meter.totals() == {"verify": 5, "generations": 3}
    assert meter.dropped() == {"duplicate": 3}


@pytest.mark.parametrize("dedupe", ["", "none", None, True])
def test_there_are_two_ways_to_dedupe(recorder: SpecDecRecorder, dedupe: Any) -> None:
    with pytest.raises(ValueError, match="'window' or 'batch'"):
        recorder.record_batch([], dedupe=dedupe)


def indices(step: int, session: str | None = None) -> list[GenerationReport]:
    return [final(str(n), verify=n + step, session_id=session) for n in range(4)]


def test_ids_that_are_indices_and_come_back_get_one_warning_that_says_what_to_pass(
    recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.record_batch(indices(0))
    assert caplog.records == []
    for step in (1, 2, 3):
        recorder.record_batch(indices(step))
    lines = [line.getMessage() for line in caplog.records if "look like indices" in line.getMessage()]
    assert len(lines) == 1
    assert "session_id" in lines[0]
    assert "dedupe='batch'" in lines[0]


@pytest.mark.parametrize(
    "hand_over",
    [
        lambda recorder, step: recorder.record_batch(indices(step, f"step {step}")),
        lambda recorder, step: recorder.record_batch(indices(step), dedupe="batch"),
        lambda recorder, step: recorder.record_batch(
            [final(f"cmpl-{n}", verify=n, session_id="s") for n in range(4)] + [final(str(step), verify=1)]
        ),
    ],
    ids=["a session each", "batch", "real ids sent twice"],
)
def test_no_warning_where_ids_are_told_apart(
    recorder: SpecDecRecorder, caplog: pytest.LogCaptureFixture, hand_over: Callable[[SpecDecRecorder, int], object]
) -> None:
    for step in range(3):
        hand_over(recorder, step)
    assert [line for line in caplog.records if "look like indices" in line.getMessage()] == []


# The engine counts too


def test_the_same_generations_counted_by_engine_and_response_are_never_added_up(
    meter: Meter, recorder: SpecDecRecorder
) -> None:
    batch = [final(str(n), **whole(3, 8, 2), session_id="s", model="m", provider="vllm") for n in range(5)]
    summary = recorder.record_batch(batch)
    attributes = {"gen_ai.request.model": "m", "gen_ai.provider.name": "vllm", "specdec.source": "engine"}
    ratio_sets = {Metric.ACCEPTED: "accept_rate", Metric.PROPOSED: "accept_rate", Metric.GENERATIONS: "accept_rate"}
    values = {Metric.ACCEPTED: 15, Metric.PROPOSED: 40, Metric.GENERATIONS: 5}
    pool_for(meter.provider).add(
        (Series.of(metric, {**attributes, "specdec.ratio_set": ratio_sets[metric]}), value)
        for metric, value in values.items()
    )
    groups = {group.attributes["specdec.source"]: group for group in pool(meter.reader.get_metrics_data())}
    assert groups.keys() == {"engine", "response"}
    assert groups["engine"].generations == groups["response"].generations == summary.generations == 5
    assert groups["engine"].totals["accepted"] == groups["response"].totals["accepted"] == summary.totals["accepted"]
    assert groups["engine"].ratios["accept_rate"] == groups["response"].ratios["accept_rate"]


# Order


def test_ascending_means_that_no_known_count_goes_down() -> None:
    reports = [
        running(completion=5),
        running(accepted=3, verify=2),
        running(verify=1),
        running(accepted=1, completion=5),
    ]
    ordered = ascending(reports)
    assert ordered is not None
    assert sorted(map(id, ordered)) == sorted(map(id, reports))
    for field in COUNT_FIELDS:
        known = [value for each in ordered if (value := getattr(each.counts, field)) is not None]
        assert known == sorted(known)


def test_of_equal_reports_the_one_that_knows_more_comes_first() -> None:
    less, more = running(accepted=3), running(accepted=3, proposed=8)
    assert ascending([less, more]) == ascending([more, less]) == [more, less]


def test_many_running_reports_of_one_generation_cost_no_more_than_their_number() -> None:
    reports = [running(accepted=n, verify=None if n % 2 else n) for n in range(20_000)]
    assert ascending(reports[::-1]) == reports


# The summary


def summary_of(*reports: GenerationReport, speculation: bool | None = True) -> BatchSummary:
    return SpecDecRecorder(Meter().provider, speculation=speculation).record_batch(reports)


SUMMARY = summary_of(
    final("g", **whole(1, 2, 1)), final("h", **whole(9, 10, 2)), final("g", **whole(1, 2, 1)), final("i", completion=7),
    final("j", accepted=1), final("j", accepted=2),
)  # fmt: skip


def test_the_names_for_a_tracker() -> None:
    assert SUMMARY.as_dict() == {
        "spec/acceptance_length": 13 / 3,
        "spec/accept_rate": 10 / 12,
        "spec/tokens_per_verify": 15 / 3,
        "spec/coverage/acceptance_length": 2 / 3,
        "spec/coverage/accept_rate": 2 / 3,
        "spec/coverage/tokens_per_verify": 2 / 3,
        "spec/accepted_total": 10,
        "spec/proposed_total": 12,
        "spec/verify_total": 3,
        "spec/completion_total": 22,
        "spec/emitted_total": 13,
        "spec/numerator/acceptance_length": 13,
        "spec/numerator/accept_rate": 10,
        "spec/numerator/tokens_per_verify": 15,
        "spec/denominator/acceptance_length": 3,
        "spec/denominator/accept_rate": 12,
        "spec/denominator/tokens_per_verify": 3,
        "spec/covered/acceptance_length": 2,
        "spec/covered/accept_rate": 2,
        "spec/covered/tokens_per_verify": 2,
        "spec/unique_generation_count": 3,
        "spec/record_occurrence_count": 6,
        "spec/duplicate_record_count": 1,
        "spec/conflicting_generation_count": 1,
        "spec/sample_count": 4,
    }


def test_a_ratio_that_does_not_exist_is_left_out_and_its_sums_are_not() -> None:
    data = summary_of(final(accepted=0, proposed=0, emitted=None, verify=None, completion=3)).as_dict()
    assert "spec/accept_rate" not in data
    assert data["spec/numerator/accept_rate"] == data["spec/denominator/accept_rate"] == 0
    assert data["spec/coverage/accept_rate"] == 1.0
    assert data["spec/accepted_total"] == 0
    assert "spec/verify_total" not in data  # unknown is not zero


@pytest.mark.parametrize(
    "summary",
    [
        SUMMARY,
        summary_of(),
        summary_of(final(**whole(3, 8, 2)), final("h", **whole(1, 3, 3), sample_id="s")),
        summary_of(running(verify=3)),
        summary_of(final(verify=0, emitted=0)),
        summary_of(final(completion=2**62)),
    ],
)
def test_nothing_is_lost_on_the_way_through_json_or_a_tracker_or_a_process(summary: BatchSummary) -> None:
    data = json.loads(json.dumps(summary.as_dict()))
    assert BatchSummary.from_dict(data) == summary
    assert BatchSummary.from_dict({**data, "train/loss": 0.5, "spec/unknown": "x"}) == summary
    assert BatchSummary.from_dict(data).as_dict() == summary.as_dict()
    assert BatchSummary.from_dict(data).per_sample_means() == summary.per_sample_means()
    assert pickle.loads(pickle.dumps(summary)) == summary


def test_a_tracker_that_keeps_floats_loses_nothing_either() -> None:
    data = {name: float(value) for name, value in SUMMARY.as_dict().items()}
    assert BatchSummary.from_dict(data) == SUMMARY


@pytest.mark.parametrize("value", [None, -1, 1.5, "1", True, float("nan"), float("inf"), [1]])
@pytest.mark.parametrize("name", ["spec/unique_generation_count", "spec/numerator/accept_rate", "spec/accepted_total"])
def test_a_summary_names_what_is_wrong_with_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        BatchSummary.from_dict({**SUMMARY.as_dict(), name: value})


def test_a_summary_without_its_sums_is_none() -> None:
    with pytest.raises(ValueError, match="spec/numerator/acceptance_length"):
        BatchSummary.from_dict({"spec/accept_rate": 0.5})


def test_ranks_are_merged_by_sums() -> None:
    ranks = [summary_of(final(f"{rank}", **whole(rank, 4 * rank, rank))) for rank in (1, 5, 20)]
    merged = ranks[0].merge(ranks[1]).merge(ranks[2])
    assert merged == ranks[2].merge(ranks[0].merge(ranks[1]))
    assert merged.ratios["accept_rate"] == 26 / 104
    assert merged.generations == 3


def test_merging_keeps_unknown_unknown_and_adds_what_one_rank_knows() -> None:
    merged = summary_of(final("a", verify=2)).merge(summary_of(final("b", completion=5)))
    assert merged.totals == {"verify": 2, "completion": 5}
    assert merged.ratios == {}
    assert merged.coverage["tokens_per_verify"] == 0.0


# The means of old


def test_the_means_over_samples_are_what_frameworks_have_shown() -> None:
    skewed = [report(record) for record in CASES["skewed-batch"]["records"]]
    summary = summary_of(*skewed)
    rates = [r.counts.accepted / r.counts.proposed for r in skewed if r.counts.accepted and r.counts.proposed]
    lengths = [r.counts.completion / r.counts.verify for r in skewed if r.counts.completion and r.counts.verify]
    assert summary.per_sample_means() == pytest.approx(
        {"spec_accept_rate": sum(rates) / 8, "spec_accept_length": sum(lengths) / 8}, rel=1e-15
    )
    assert summary.per_sample_means()["spec_accept_rate"] < 0.25 * summary.ratios["accept_rate"]


def test_a_sample_may_hold_many_generations_and_a_generation_may_be_in_many_samples() -> None:
    a, b, c = whole(1, 2, 1), whole(9, 10, 2), whole(3, 4, 1)
    summary = summary_of(
        final("A", **a, sample_id="1"), final("B", **b, sample_id="1"),
        final("A", **a, sample_id="2"), final("C", **c, sample_id="2"),
    )  # fmt: skip
    assert summary.samples == 2
    assert summary.per_sample_means()["spec_accept_rate"] == pytest.approx((10 / 12 + 4 / 6) / 2)
    assert summary.ratios["accept_rate"] == 13 / 16


def test_without_a_sample_id_each_generation_is_a_sample() -> None:
    summary = summary_of(final("g", **whole(1, 2, 1)), final("g", **whole(1, 2, 1)), final("h", **whole(9, 10, 2)))
    assert summary.samples == 2
    assert summary.per_sample_means()["spec_accept_rate"] == pytest.approx((1 / 2 + 9 / 10) / 2)


@pytest.mark.parametrize(
    "lacking",
    [
        final("x", completion=3),
        final("x", accepted=1, completion=3),
        running("x", **whole(1, 2, 1)),
    ],
)
def test_a_mean_exists_only_where_every_sample_has_its_complete_pair(lacking: GenerationReport) -> None:
    good = final("g", **whole(1, 2, 1))
    for sample in (None, "g's own"):
        summary = summary_of(
            dataclasses.replace(good, sample_id="g's own"), dataclasses.replace(lacking, sample_id=sample)
        )
        assert summary.per_sample_means() == {}
    merged = summary_of(good).merge(summary_of(lacking))
    assert merged.per_sample_means() == {}


def test_a_sample_without_a_draft_has_no_ratio_which_is_not_zero() -> None:
    good, nothing = final("g", **whole(1, 2, 1)), final("x", accepted=0, proposed=0, verify=0, completion=1)
    assert summary_of(good, nothing).per_sample_means() == {}
    one = [dataclasses.replace(each, sample_id="one") for each in (good, nothing)]
    assert summary_of(*one).per_sample_means() == {"spec_accept_rate": 0.5, "spec_accept_length": 4.0}


def test_each_mean_wants_its_own_pair() -> None:
    summary = summary_of(final("g", accepted=1, proposed=2), final("h", accepted=1, proposed=4, verify=1, completion=3))
    assert summary.per_sample_means() == {"spec_accept_rate": 0.375}


def test_a_sample_in_conflict_leaves_no_mean() -> None:
    summary = summary_of(final("g", accepted=1, proposed=2), final("j", accepted=1), final("j", accepted=2))
    assert summary.per_sample_means() == {}


def test_an_attempt_without_a_token_is_no_sample() -> None:
    summary = summary_of(final("g", **whole(1, 2, 1)), final("x", completion=0))
    assert summary.samples == 1
    assert summary.per_sample_means()["spec_accept_rate"] == 0.5


def test_means_of_ranks_are_merged_by_sums_too() -> None:
    ranks = [summary_of(*(final(f"{rank}-{n}", **whole(n, 7, 3)) for n in range(rank))) for rank in (1, 2, 5)]
    together = summary_of(*(final(f"{rank}-{n}", **whole(n, 7, 3)) for rank in (1, 2, 5) for n in range(rank)))
    assert ranks[2].merge(ranks[0]).merge(ranks[1]) == together
    assert ranks[0].merge(ranks[1].merge(ranks[2])).per_sample_means() == together.per_sample_means()


def test_the_means_say_why_not_to_use_them() -> None:
    text = BatchSummary.per_sample_means.__doc__ or ""
    assert "Do not use them" in text
    assert "cannot be pooled" in text


# Threads


def test_the_same_batch_from_many_threads_is_counted_once(meter: Meter, recorder: SpecDecRecorder) -> None:
    batch = [final(str(n), **whole(3, 8, 2), session_id="s") for n in range(50)]
    with ThreadPoolExecutor(16) as threads:
        summaries = list(threads.map(lambda _: recorder.record_batch(batch), range(16), timeout=60))
    assert all(summary == summaries[0] for summary in summaries)
    assert meter.totals() == {**summaries[0].totals, "generations": 50}
    assert meter.dropped() == {"duplicate": 15 * 50}


def test_a_collection_sees_each_batch_whole_or_not_at_all(meter: Meter, recorder: SpecDecRecorder) -> None:
    batches = [[final(f"{b}-{n}", **whole(3, 8, 2)) for n in range(10)] for b in range(100)]
    recorder.record_batch([final("first", **whole(3, 8, 2))])
    with ThreadPoolExecutor(2) as threads:
        handing = threads.submit(lambda: [recorder.record_batch(batch) for batch in batches])
        while not handing.done():
            totals = meter.totals()
            assert totals["generations"] % 10 == 1
            assert totals["accepted"] == 3 * totals["generations"]
        assert len(handing.result(timeout=60)) == 100
    assert meter.totals()["generations"] == 1001
