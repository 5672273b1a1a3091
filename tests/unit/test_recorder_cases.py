"""The handed cases whose batches can be told to a recorder one record at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from otel_specdec.counts import COUNT_FIELDS
from tests.unit.collected import Meter

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "batches.json").read_text())

# Only a whole batch shows the conflict before anything is counted; one by one, what an earlier call added stays.
BATCHES_ONLY = {"conflict-left-out-whole"}


def report(record: dict[str, Any]) -> GenerationReport:
    counts = SpecCounts(**{field: record.get(field) for field in COUNT_FIELDS})
    return GenerationReport(record["generation"], counts, session_id=record["session"])


@pytest.mark.parametrize("name", sorted(CASES.keys() - BATCHES_ONLY))
def test_a_handed_case_comes_out_as_told(name: str) -> None:
    case = CASES[name]
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=case.get("speculation_enabled"))
    for record in case["records"]:
        recorder.record(report(record))
    expect = dict(case["expect"])
    if expect.pop("emits", None) == "nothing":
        assert meter.points() == []
        assert expect == {}
        return
    pooled, dropped = meter.pooled(), meter.dropped()
    for field in COUNT_FIELDS:
        if field in expect:
            assert pooled.totals[field] == expect.pop(field)
    assert pooled.generations == expect.pop("generations", pooled.generations)
    assert dropped.get("duplicate", 0) == expect.pop("duplicates", 0)
    assert dropped.get("conflict", 0) == expect.pop("conflicts", 0)
    assert len(case["records"]) == expect.pop("records", len(case["records"]))
    for ratio, coverage in expect.pop("coverage", {}).items():
        assert pooled.coverage[ratio] == pytest.approx(coverage)
    assert {ratio: pooled.ratios[ratio] for ratio in expect} == pytest.approx(expect)


def test_one_record_at_a_time_a_conflict_leaves_what_was_added() -> None:
    (case,) = BATCHES_ONLY
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for record in CASES[case]["records"]:
        recorder.record(report(record))
    assert meter.totals() == {"accepted": 1 + 2, "proposed": 4 + 4, "generations": 2}
    assert meter.dropped() == {"conflict": 1}
