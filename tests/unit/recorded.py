"""Answers of real servers beside what the same engine counted in its own process for the same requests.

`DIFFERENT_VLLM` and `DIFFERENT_SGLANG` list every case in which the response says less than its engine knew, or
something else, with the reason. Used for the recorded answers (tests/unit/payloads) and for live ones (tests/vllm,
tests/sglang).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from otel_specdec import GenerationReport, StreamedResponse, counts_from_payload, reports_from_payload

FOLDER = Path(__file__).parent / "payloads"
FIELDS = ("accepted", "proposed", "verify", "completion")

Case = dict[str, Any]
"""`path`, `request`, `response` or `chunks`, and `truth`: the engine's own numbers."""

Other = tuple[str, list[dict[str, "int | None"]]]
"""The reason, and for each report the counts that are not the engine's; None is unknown."""

NO_DRAFTS: dict[str, int | None] = dict.fromkeys(("accepted", "proposed", "verify"))
NOTHING: dict[str, int | None] = {**NO_DRAFTS, "completion": None}

SGLANG_K = 3
"""Drafts of a step in the recorded SGLang: --speculative-num-draft-tokens less one."""

DIFFERENT_SGLANG: dict[str, Other] = {
    "native, one token": ("a request without a verify step has no counter in meta_info", [NO_DRAFTS]),
    "chat, one token": ("a request without a verify step has no counter in sglext", [NO_DRAFTS]),
    "completion, not asked for details": ("no return_spec_tokens_details, no counters", [NO_DRAFTS]),
    "completion, two prompts": (
        "sglext has the first prompt's counters only, and one usage is summed over both",
        [{"completion": None}, NOTHING],
    ),
    **dict.fromkeys(
        ("completion, two sequences", "completion, two sequences streamed", "chat, two sequences"),
        ("one usage is summed over the sequences", [{"completion": None}] * 2),
    ),
}
DIFFERENT_VLLM: dict[str, Other] = {
    **dict.fromkeys(
        ("two prompts", "two sequences", "two sequences, streamed"),
        ("vLLM gives no metrics where there are several sequences, and one usage for all of them", [NOTHING] * 2),
    ),
    **dict.fromkeys(
        ("stop string", "stop string, streamed"),
        ("the frontend ends the request, so its metrics never arrive, and usage lacks what the client did not get",
         [{**NO_DRAFTS, "completion": 8}]),
    ),
    "streamed, usage not asked for": ("no stream_options.include_usage, no usage chunk", []),
    "prefix-cache hit": (
        "vLLM counts the padding of a request's first step as drafts", [{"proposed": 12, "verify": 3}],
    ),
}  # fmt: skip


def recorded(engine: str) -> dict[str, Case]:
    """All recorded cases of an engine, by name."""
    return {
        name: case
        for path in sorted((FOLDER / engine).glob("*.json"))
        for name, case in json.loads(path.read_text())["cases"].items()
    }


def payload_of(case: Case) -> Any:
    """What to hand over: the response, the last message of a native stream, or a stream put together."""
    if "chunks" not in case:
        return case["response"]
    if case["path"] == "/generate":
        return case["chunks"][-1]
    stream = StreamedResponse()
    for chunk in case["chunks"]:
        stream.add(f"data: {json.dumps(chunk)}")
    return stream.payload


def told(reports: list[GenerationReport]) -> list[dict[str, int | None]]:
    return [{field: getattr(report.counts, field) for field in FIELDS} for report in reports]


def check_vllm(name: str, case: Case) -> None:
    """The reports of a response are the engine's own counts of its request, or what is listed."""
    payload, truth = payload_of(case), case["truth"]
    reports = reports_from_payload(payload)
    if name in DIFFERENT_VLLM:
        _, others = DIFFERENT_VLLM[name]
        assert told(reports) == [{field: truth[field] for field in FIELDS} | other for other in others]
    else:
        assert told(reports) == [{field: truth[field] for field in FIELDS}]
        (report,) = reports
        if truth["verify"]:
            # No step of a request may have had the most drafts that there can be.
            deepest = sum(proposed > 0 for proposed in truth["proposed_by_position"])
            assert list(report.accepted_by_position or ()) == truth["accepted_by_position"][:deepest]
            assert list(report.proposed_by_position or ()) == truth["proposed_by_position"][:deepest]
    for report in reports:
        assert report.finished
        assert report.model == "tiny"
        assert report.generation_id.split("#")[0] == payload["id"]
        assert report.provider == ("vllm" if report.counts.knows_drafts else None)


def check_sglang(name: str, case: Case) -> None:
    """The reports of a response are the engine's own counts of its request, or what is listed.

    Of proposed there is no truth in any row: SGLang computes it, verify steps × k, and NGRAM's tree is filled up with
    zeros, which that counts too.
    """
    truths = case["truth"]
    _, others = DIFFERENT_SGLANG.get(name, ("", [{}] * len(truths)))
    native = case["path"] == "/generate"
    reports = reports_from_payload(payload_of(case))
    known = native or any(report.counts.knows_drafts for report in reports)
    for report, truth, other in zip(reports, truths, others, strict=True):
        expected = {field: truth[field] for field in ("accepted", "verify", "completion")} | other
        expected["proposed"] = None if expected["accepted"] is None else SGLANG_K * truth["verify"]
        assert told([report]) == [expected]
        assert report.provider == ("sglang" if known else None)
        assert report.finished
        if native:
            assert report.generation_id == truth["id"]
        if report.counts.accepted is not None:
            accepted_at = [sum(truth["histogram"][i + 1 :]) for i in range(SGLANG_K)]
            assert list(report.accepted_by_position or ()) == accepted_at
            assert list(report.proposed_by_position or ()) == [truth["verify"]] * SGLANG_K


def check_live_sglang(name: str, payload: Any, reports: list[GenerationReport], grown: dict[str, int]) -> None:
    """The reports of a live answer add up to what the engine's counters `grown` by, but for what is listed."""
    _, others = DIFFERENT_SGLANG.get(name, ("", [{}] * len(reports)))
    assert len(reports) == len(others) == grown["generations"]
    for field in ("accepted", "verify", "completion"):
        values = [getattr(report.counts, field) for report in reports]
        assert [value is None for value in values] == [other.get(field, 0) is None for other in others], field
        if None not in values:
            assert sum(values) == grown[field], field
    for report in reports:
        verify = report.counts.verify
        assert report.counts.proposed == (None if verify is None else SGLANG_K * verify)
    assert "proposed" not in grown  # NGRAM's tree is filled up with zeros: the engine's source does not know
    assert counts_from_payload(payload).completion in (grown["completion"], None)
