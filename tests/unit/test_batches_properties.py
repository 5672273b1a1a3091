"""Batches of any reports, against sums that are worked out in the plainest way."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_specdec import BatchSummary, GenerationReport, SpecCounts, SpecDecRecorder, counts_from_payload
from otel_specdec.batches import ascending
from otel_specdec.counts import COUNT_FIELDS
from otel_specdec.windows import digest_of
from tests.unit.collected import Meter

Identity = tuple["str | None", str]

count = st.none() | st.integers(0, 40)
ids = st.tuples(st.sampled_from([None, "s", "t"]), st.sampled_from(["a", "b", "c", "7", "8"]))


@st.composite
def reports(draw: st.DrawFn, *, only_final: bool = True) -> GenerationReport:
    session, generation = draw(ids)
    counts = SpecCounts(*(draw(count) for _ in COUNT_FIELDS))
    return GenerationReport(
        generation,
        counts,
        session_id=session,
        finished=only_final or draw(st.booleans()),
        sample_id=draw(st.sampled_from([None, f"{session} {generation}"])),
        model=draw(st.sampled_from([None, "m", "n"])),
    )


def identity_of(report: GenerationReport) -> Identity:
    return report.session_id, report.generation_id


def counted_once(batch: list[GenerationReport], speculation: bool | None) -> tuple[Counter[str], int, set[Identity]]:
    """Totals and generations of a batch of final reports, and the identities in conflict."""
    totals: Counter[str] = Counter()
    generations = 0
    conflicts = set()
    for identity, its in groupby(sorted(batch, key=lambda r: repr(identity_of(r))), identity_of):
        same = list(its)
        # A report without a token is no generation, and counts for nothing beside one that is.
        same = [report for report in same if report.counts.completion != 0] or same[:1]
        if len({report.counts for report in same}) > 1:
            conflicts.add(identity)
            continue
        counts = same[0].counts
        known = counts.accepted is not None or counts.proposed is not None or counts.verify is not None
        if counts.completion == 0 or not (known or speculation):
            continue
        generations += 1
        for field in COUNT_FIELDS:
            if (value := getattr(counts, field)) is not None:
                totals[field] += value
    return totals, generations, conflicts


def check_rules(summary: BatchSummary) -> None:
    assert 0 <= summary.ratios.get("accept_rate", 0) <= 1
    assert all(ratio >= 0 for ratio in summary.ratios.values())
    assert all(0 <= share <= 1 for share in summary.coverage.values())
    for name in summary.ratios:
        assert summary.denominators[name] > 0
    assert all(mean >= 0 for mean in summary.per_sample_means().values())
    assert BatchSummary.from_dict(json.loads(json.dumps(summary.as_dict()))) == summary


@given(
    st.lists(reports(), max_size=12),
    st.lists(st.integers(0, 11), max_size=6),
    st.integers(0, 2**32),
    st.sampled_from([None, True]),
    st.sampled_from(["window", "batch"]),
)
def test_in_any_order_and_repetition_the_counters_are_the_sums_over_unique_unconflicted_identities(
    batch: list[GenerationReport], repeated: list[int], seed: int, speculation: bool | None, dedupe: str
) -> None:
    batch = batch + [batch[i] for i in repeated if i < len(batch)]
    random.Random(seed).shuffle(batch)
    meter = Meter()
    summary = SpecDecRecorder(meter.provider, speculation=speculation).record_batch(batch, dedupe=dedupe)
    totals, generations, conflicts = counted_once(batch, speculation)
    expected = dict(totals)
    assert summary.totals == expected
    assert (summary.generations, summary.conflicts, summary.reports) == (generations, len(conflicts), len(batch))
    counters = meter.totals()
    assert counters.pop("generations", 0) == generations
    assert counters == expected
    assert meter.dropped().get("conflict", 0) == sum(identity_of(report) in conflicts for report in batch)
    assert meter.dropped().get("duplicate", 0) == summary.duplicates
    check_rules(summary)
    if expected or generations:
        assert meter.pooled().ratios == summary.ratios
        assert meter.pooled().coverage == summary.coverage


@given(st.lists(reports(), max_size=12), st.lists(st.integers(0, 4), max_size=24), st.integers(0, 2**32))
def test_any_split_of_unconflicted_reports_into_batches_gives_the_same_counters(
    batch: list[GenerationReport], cuts: list[int], seed: int
) -> None:
    first = {identity_of(report): report for report in reversed(batch)}
    batch = [report for report in batch if report.counts == first[identity_of(report)].counts]
    batch += [report for report, cut in zip(batch, cuts, strict=False) if cut == 0]
    random.Random(seed).shuffle(batch)
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    seen: dict[tuple[str, frozenset[Any]], int] = {}
    rest = batch
    for cut in [*cuts, len(batch)]:
        if cut == 1:
            for report in rest[:1]:
                recorder.record(report)
        else:
            recorder.record_batch(rest[:cut])
        rest = rest[cut:]
        now = {point.series: point.value for point in meter.points()}
        assert all(now[series] >= value for series, value in seen.items()), "a counter went down"
        seen = now
    totals, generations, _ = counted_once(batch, None)
    counters = meter.totals()
    assert counters.pop("generations", 0) == generations
    assert counters == dict(totals)
    assert "conflict" not in meter.dropped()


@given(st.lists(reports(), max_size=8), st.lists(reports(only_final=False), max_size=8))
def test_a_conflict_with_an_earlier_call_leaves_the_earlier_values(
    earlier: list[GenerationReport], later: list[GenerationReport]
) -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    recorder.record_batch(earlier)
    before = {point.series: point.value for point in meter.points()}
    counted = {identity for identity in map(identity_of, earlier) if digest_of(identity) in recorder._finished}
    recorder.record_batch([report for report in later if identity_of(report) in counted])
    after = {point.series: point.value for point in meter.points()}
    names = {name for name, _ in after} - {"specdec.dropped_reports"}
    assert {series: value for series, value in after.items() if series[0] in names} == {
        series: value for series, value in before.items() if series[0] in names
    }


@given(st.lists(reports(only_final=False), max_size=10), st.integers(0, 2**32), st.sampled_from([None, True]))
def test_running_reports_make_no_difference_to_order_either(
    batch: list[GenerationReport], seed: int, speculation: bool | None
) -> None:
    summaries, totals, dropped = [], [], []
    for shuffled in (batch, random.Random(seed).sample(batch, len(batch))):
        meter = Meter()
        summaries.append(SpecDecRecorder(meter.provider, speculation=speculation).record_batch(shuffled))
        totals.append(meter.totals())
        dropped.append(meter.dropped())
        check_rules(summaries[-1])
    assert summaries[0].totals == summaries[1].totals
    assert summaries[0].ratios == summaries[1].ratios
    assert summaries[0] == summaries[1]
    assert totals[0] == totals[1]
    assert totals[0].pop("generations", 0) == summaries[0].generations
    assert totals[0] == summaries[0].totals
    assert dropped[0] == dropped[1]


@given(st.lists(reports(), max_size=10), st.lists(reports(), max_size=10), st.sampled_from([None, True]))
def test_merge_equals_the_batch_of_the_union_where_identities_are_disjoint(
    one: list[GenerationReport], two: list[GenerationReport], speculation: bool | None
) -> None:
    mine = {identity_of(report) for report in one}
    two = [report for report in two if identity_of(report) not in mine]

    def summary(batch: list[GenerationReport]) -> BatchSummary:
        return SpecDecRecorder(Meter().provider, speculation=speculation).record_batch(batch)

    merged = summary(one).merge(summary(two))
    assert merged == summary(two).merge(summary(one)) == summary(one + two)
    assert merged.per_sample_means() == summary(one + two).per_sample_means()
    through_json = BatchSummary.from_dict(json.loads(json.dumps(summary(one).as_dict())))
    assert through_json.merge(summary(two)) == merged


@given(st.lists(st.tuples(count, count, count, count, count), max_size=7))
def test_ascending_finds_an_order_wherever_there_is_one(rows: list[tuple[int | None, ...]]) -> None:
    running = [GenerationReport("g", SpecCounts(*row), finished=False) for row in rows]
    ordered = ascending(running)
    found = ordered is not None and is_ascending(ordered)
    assert (ordered is None) or found
    assert found == (any_order(rows) is not None)


def is_ascending(ordered: list[GenerationReport]) -> bool:
    columns = [[getattr(report.counts, field) for report in ordered] for field in COUNT_FIELDS]
    known = [[value for value in column if value is not None] for column in columns]
    return all(column == sorted(column) for column in known)


def any_order(rows: list[tuple[int | None, ...]]) -> list[tuple[int | None, ...]] | None:
    """The plainest way: of the rows left, take any that is nowhere above another one."""
    left, ordered = list(rows), []
    while left:
        for row in left:
            if all(a is None or b is None or a <= b for other in left for a, b in zip(row, other, strict=True)):
                ordered.append(row)
                left.remove(row)
                break
        else:
            return None
    return ordered


@given(reports(only_final=False), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_a_report_keeps_its_meaning_through_json(report: GenerationReport, positions: list[tuple[int, int]]) -> None:
    with_positions = GenerationReport(
        report.generation_id, report.counts, session_id=report.session_id, finished=report.finished,
        accepted_by_position=[a for a, _ in positions], proposed_by_position=[p for _, p in positions],
    )  # fmt: skip
    for each in (report, with_positions):
        assert GenerationReport.from_dict(json.loads(json.dumps(each.as_dict()))) == each


@given(st.tuples(count, count, count, count))
def test_an_old_payload_form_is_read_as_the_payload_is(row: tuple[int | None, ...]) -> None:
    names = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct", "completion_tokens")
    old = dict(zip(names, row, strict=True))
    expected = counts_from_payload(old)
    assert GenerationReport.from_dict({"generation_id": "g", "counts": old}).counts == expected
    assert GenerationReport.from_dict({"generation_id": "g", "session_id": "s", **old}).counts == expected


@given(st.tuples(count, count, count, count, count), st.tuples(count, count, count, count, count))
def test_resumed_parts_add_up_where_both_are_known(one: tuple[int | None, ...], two: tuple[int | None, ...]) -> None:
    plus = SpecCounts(*one).plus(SpecCounts(*two))
    vouched = SpecCounts(*one).plus(SpecCounts(*two), missing_did_not_run=True)
    for field, a, b in zip(COUNT_FIELDS, one, two, strict=True):
        assert getattr(plus, field) == (None if a is None or b is None else a + b)
        assert getattr(vouched, field) == (None if a is None and b is None else (a or 0) + (b or 0))
