"""No payload of any shape raises, and whatever is read of one keeps the contract's rules."""

from __future__ import annotations

import json
import random
import string
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_specdec import SpecCounts, SpecDecRecorder, StreamedResponse, counts_from_payload, payloads
from otel_specdec import reports_from_payload as reports_from
from otel_specdec.counts import COUNT_FIELDS
from tests.unit.collected import Meter

NAMES = sorted(
    {name for family in payloads.FAMILIES for name in family[2:] if name}
    | {name for family in payloads.FAMILIES for place in family.places for name in place}
    | {name for path in payloads.COMPLETIONS for name in path}
    | {"id", "request_id", "model", "object", "choices", "index", "finish_reason", "dp_rank", "stop", "text", "delta"}
    | {"spec_new_name", "draft_tokens", "speculation", "model_extra", "__class__", "get", "items", ""}
)
ODD: list[Any] = [
    None, True, False, 0, 1, 2, 3, 15, -1, 2**31, 2**63 - 1, 2**63, -(2**70), 10**4000, 0.0, 1.0, 4.5, float("nan"),
    float("inf"), "", "r", "15", "stop", "chat.completion.chunk", "\ud800", "\x00", "é" * 300, b"", b"\xff\xfe{", b"{}",
    "{", "[]", '{"id": "r", "spec_verify_ct": 3}', object(), 1j, range(3), {1, 2}, SimpleNamespace(id="r"), int, len,
]  # fmt: skip
RANDOM_PAYLOADS = 100_000


class Payloads:
    """Random payloads, mostly of names that mean something, some of them nested out of all reason."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def name(self) -> str:
        if self.random.random() < 0.9:
            return self.random.choice(NAMES)
        return "".join(self.random.choices(string.printable, k=self.random.randrange(12)))

    def value(self, depth: int) -> Any:
        kind = self.random.random()
        if depth == 0 or kind < 0.45:
            return self.random.choice(ODD)
        if kind < 0.6:
            return self.random.randrange(20)
        if kind < 0.8:
            return {self.name(): self.value(depth - 1) for _ in range(self.random.randrange(7))}
        if kind < 0.9:
            return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        if kind < 0.95:
            return SimpleNamespace(**{name: self.value(depth - 1) for name in self.random.choices(NAMES, k=4) if name})
        return tuple(self.value(depth - 1) for _ in range(self.random.randrange(3)))

    def real(self) -> dict[str, Any]:
        """Something like what an engine answers, with some of its values replaced by anything."""
        details = {"num_spec_steps": 5, "num_accepted_draft_tokens": 9, "num_draft_tokens": 15, "num_spec_tokens": 3}
        steps = {"acceptance_histogram": [1, 1, 1, 2], "per_step_drafted": [3, 3, 3, 3, 3]}
        pair = self.random.choice(payloads.FAMILIES[:3])
        sglang = {pair.accepted: 9, pair.proposed: 15, pair.verify: 5, pair.histogram: [1, 1, 1, 2]}
        choices = [
            {"index": i, "finish_reason": "stop", "text": "x"} for i in range(self.random.choice((0, 1, 1, 2, 3)))
        ]
        openai = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": choices,
                  "usage": {"prompt_tokens": 3, "completion_tokens": 15}}  # fmt: skip
        made: dict[str, Any] = self.random.choice([
            {"meta_info": {"id": "r", "finish_reason": {"type": "stop"}, "completion_tokens": 15, **sglang}},
            {"id": "r", "completion_tokens": 15, **sglang},
            {**openai, "sglext": {"spec_tokens_details": self.random.choice((sglang, [sglang, dict(sglang)]))}},
            {**openai, "metrics": {"speculative_decoding": {**details, **steps}}},
            {**openai, "timings": {"draft_n": 15, "draft_n_accepted": 9, "predicted_n": 15}},
        ])  # fmt: skip
        for _ in range(self.random.randrange(4)):
            place: Any = made
            while isinstance(place, dict) and place:
                key = self.random.choice(list(place))
                if not isinstance(place[key], dict) or self.random.random() < 0.2:
                    place[key] = self.value(2)
                    break
                place = place[key]
        return made

    def payload(self) -> Any:
        made = self.real() if self.random.random() < 0.7 else {self.name(): self.value(4) for _ in range(3)}
        kind = self.random.random()
        if kind < 0.7:
            return made
        if kind < 0.8:
            return self.value(3)
        if kind < 0.81:
            deep: Any = made
            for _ in range(self.random.choice((100, 2000))):
                deep = {self.name(): deep} if self.random.random() < 0.5 else [deep]
            return deep
        text = json.dumps(made, default=repr, skipkeys=True)
        if kind < 0.9:
            return text[: self.random.randrange(len(text) + 1)] if kind < 0.85 else text
        raw = bytearray(text, "utf-8", "surrogatepass")
        for _ in range(self.random.randrange(4)):
            raw[self.random.randrange(len(raw))] = self.random.randrange(256)
        return bytes(raw)


def check(counts: SpecCounts) -> None:
    for field in COUNT_FIELDS:
        value = getattr(counts, field)
        assert value is None or (type(value) is int and 0 <= value < 2**63)
    assert counts.emitted is None


@pytest.mark.parametrize("part", range(4))
def test_a_hundred_thousand_random_payloads_raise_nothing_and_read_nothing_but_counts(part: int) -> None:
    made = Payloads(part)
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=[None, True, False, None][part])
    told = drafts = 0
    for number in range(RANDOM_PAYLOADS // 4):
        payload = made.payload()
        counts = counts_from_payload(payload)
        check(counts)
        reports = recorder.record_payload(payload) if number % 10 == 0 else reports_from(payload)
        if number % 10 == 1:
            stream = StreamedResponse()
            stream.add(payload)
            reports += reports_from(stream.payload)
        for report in reports:
            check(report.counts)
            report.generation_id.encode()
            accepted, proposed = report.accepted_by_position, report.proposed_by_position
            assert (accepted is None) == (proposed is None)
            if accepted is not None and proposed is not None:
                assert len(accepted) == len(proposed) <= 32
                assert all(0 <= a <= p for a, p in zip(accepted, proposed, strict=True))
        told += len(reports)
        drafts += any(report.counts.accepted is not None for report in reports)
    # They are not all nonsense.
    assert told > 5_000
    assert drafts > 3_000
    meter.totals()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.sampled_from(NAMES) | st.text(), each),
    max_leaves=20,
)


@given(json_values)
def test_a_payload_and_its_json_text_say_the_same(payload: Any) -> None:
    text = json.dumps(payload)
    expected = json.loads(text)
    if isinstance(expected, str):
        return  # a text as a payload is JSON itself
    assert counts_from_payload(text) == counts_from_payload(text.encode()) == counts_from_payload(expected)
    assert reports_from(text) == reports_from(expected)


@given(st.binary() | st.text())
def test_any_bytes_and_any_text_raise_nothing(payload: bytes | str) -> None:
    check(counts_from_payload(payload))
    reports_from(payload)
    stream = StreamedResponse()
    stream.add(payload)
    reports_from(stream.payload)


@given(
    st.dictionaries(
        st.sampled_from([name for family in payloads.FAMILIES[:3] for name in family[2:4]]), st.integers(0, 9)
    )
)
def test_a_pair_comes_whole_from_the_newest_family_that_has_both(payload: dict[str, int]) -> None:
    counts = counts_from_payload(payload)
    for family in payloads.FAMILIES[:3]:
        if family.accepted in payload and family.proposed in payload:
            assert (counts.accepted, counts.proposed) == (payload[family.accepted], payload[family.proposed])
            return
    assert (counts.accepted, counts.proposed) == (None, None)
