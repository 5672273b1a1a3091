"""Reports and counts that are stored, sent and added up by frameworks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry import context

from otel_specdec import GenerationReport, SpecCounts

FULL = GenerationReport(
    "g",
    SpecCounts(9, 15, 5, 15, 14),
    session_id="s",
    sample_id="7",
    model="m",
    provider="sglang",
    method="eagle3",
    engine_index=0,
    finished=False,
    accepted_by_position=[4, 3, 2],
    proposed_by_position=[5, 5, 5],
    context=context.set_value("key", "value"),
)


def through_json(report: GenerationReport) -> GenerationReport:
    return GenerationReport.from_dict(json.loads(json.dumps(report.as_dict())))


@pytest.mark.parametrize(
    "report",
    [
        FULL,
        GenerationReport("g", SpecCounts()),
        GenerationReport("g", SpecCounts(0, 0, 0, 0, 0), session_id="", sample_id=""),
        GenerationReport("g", SpecCounts(verify=0), engine_index=0, accepted_by_position=[], proposed_by_position=[0]),
    ],
)
def test_a_report_comes_back_from_json_as_it_was(report: GenerationReport) -> None:
    assert through_json(report) == report


def test_unknown_stays_unknown_and_zero_stays_zero() -> None:
    data = GenerationReport("g", SpecCounts(accepted=0)).as_dict()
    assert data == {
        "generation_id": "g",
        "counts": {"accepted": 0, "proposed": None, "verify": None, "completion": None, "emitted": None},
        "finished": True,
    }
    counts = through_json(GenerationReport("g", SpecCounts(accepted=0))).counts
    assert (counts.accepted, counts.proposed) == (0, None)


def test_the_context_is_not_stored() -> None:
    assert "context" not in FULL.as_dict()
    assert through_json(FULL).context is None


def test_counts_that_are_left_out_are_unknown() -> None:
    assert GenerationReport.from_dict({"generation_id": "g", "counts": {"verify": 3}}).counts == SpecCounts(verify=3)


@pytest.mark.parametrize(
    "stored",
    [
        {"spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 15, "spec_verify_ct": 5, "completion_tokens": 15},
        {"spec_accepted_drafts": 9, "spec_proposed_drafts": 15, "spec_verify_ct": 5, "completion_tokens": 15},
        {"spec_accept_token_num": 9, "spec_draft_token_num": 15, "spec_verify_ct": 5, "completion_tokens": 15},
        {"meta_info": {"spec_accept_token_num": 9, "spec_draft_token_num": 15, "spec_verify_ct": 5,
                       "completion_tokens": 15}},
        {"usage": {"completion_tokens": 15}, "metrics": {"speculative_decoding": {
            "num_accepted_draft_tokens": 9, "num_draft_tokens": 15, "num_spec_steps": 5}}},
    ],
)  # fmt: skip
def test_old_payload_forms_are_read_under_counts_and_beside_the_id(stored: dict[str, Any]) -> None:
    for data in ({"generation_id": "g", "counts": stored}, {"generation_id": "g", "sample_id": "7", **stored}):
        report = GenerationReport.from_dict(json.loads(json.dumps(data)))
        assert report.counts == SpecCounts(9, 15, 5, 15)
        assert through_json(report) == report


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, "generation_id"),
        ({"generation_id": None}, "generation_id"),
        ({"generation_id": "g", "counts": {"accepted": -1}}, "accepted"),
        ({"generation_id": "g", "counts": {"accepted": "1"}}, "accepted"),
        ({"generation_id": "g", "counts": {"accepted": True}}, "accepted"),
        ({"generation_id": "g", "finished": "yes"}, "finished"),
        ({"generation_id": "g", "session_id": 7}, "session_id"),
        ({"generation_id": "g", "engine_index": -1}, "engine_index"),
        ({"generation_id": "g", "accepted_by_position": [1, None]}, "accepted_by_position"),
    ],
)
def test_what_is_wrong_with_a_stored_report_is_named(data: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        GenerationReport.from_dict(data)


def test_names_of_a_later_version_are_ignored() -> None:
    assert GenerationReport.from_dict({**FULL.as_dict(), "new": 1}) == FULL


# Partial rollouts


def test_parts_of_a_resumed_generation_are_added() -> None:
    assert SpecCounts(1, 4, 1, 3, 2).plus(SpecCounts(5, 8, 2, 7, 7)) == SpecCounts(6, 12, 3, 10, 9)


def test_unknown_plus_known_is_unknown() -> None:
    assert SpecCounts(1, 4, 1, 3).plus(SpecCounts(completion=7)) == SpecCounts(completion=10)
    assert SpecCounts(completion=7).plus(SpecCounts(1, 4, 1, 3)) == SpecCounts(completion=10)


def test_unknown_plus_known_is_known_where_the_missing_part_did_not_run() -> None:
    queued = SpecCounts()  # aborted before its first token
    known = SpecCounts(1, 4, 1, 3)
    assert known.plus(queued, missing_did_not_run=True) == known
    assert queued.plus(known, missing_did_not_run=True) == known
    assert queued.plus(queued, missing_did_not_run=True) == SpecCounts()


def test_a_known_zero_is_no_missing_part() -> None:
    assert SpecCounts(0, 0, 0, 1).plus(SpecCounts(1, 4, 1, 3)) == SpecCounts(1, 4, 1, 4)


def test_a_sum_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="completion"):
        SpecCounts(completion=2**63 - 1).plus(SpecCounts(completion=1))
