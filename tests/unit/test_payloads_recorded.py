"""Answers of real servers, and what the same engine counted in its own process for the same requests.

Each file was recorded here and says with what. The rows in which a response says less than its engine knew are listed
with their reasons in `recorded.py`. `python -m tests.vllm.test_payloads_vllm` records vLLM's anew.
"""

from __future__ import annotations

import pytest

from otel_specdec import SpecDecRecorder, counts_from_payload
from tests.unit.collected import Meter
from tests.unit.recorded import (
    DIFFERENT_SGLANG,
    DIFFERENT_VLLM,
    SGLANG_K,
    Other,
    check_sglang,
    check_vllm,
    payload_of,
    recorded,
)

SGLANG = recorded("sglang")
VLLM = recorded("vllm")


@pytest.mark.parametrize("name", SGLANG)
def test_a_response_of_sglang_says_what_the_engine_counted(name: str) -> None:
    check_sglang(name, SGLANG[name])


def test_a_native_stream_of_sglang_is_one_generation_however_many_of_its_messages_are_recorded() -> None:
    case = SGLANG["native, streamed"]
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=True)
    for message in case["chunks"]:
        recorder.record_payload(message)
    (truth,) = case["truth"]
    assert meter.totals() == {
        "accepted": truth["accepted"], "proposed": SGLANG_K * truth["verify"], "verify": truth["verify"],
        "completion": truth["completion"], "generations": 1,
    }  # fmt: skip
    assert meter.pooled().coverage["accept_rate"] == 1.0


@pytest.mark.parametrize("name", VLLM)
def test_a_response_of_vllm_says_what_the_engine_counted(name: str) -> None:
    check_vllm(name, VLLM[name])


def test_one_usage_summed_over_sequences_is_the_engine_s_sum() -> None:
    for name in ("two prompts", "two sequences", "two sequences, streamed"):
        counts = counts_from_payload(payload_of(VLLM[name]))
        assert counts.completion == VLLM[name]["truth"]["completion"]
    for name in ("completion, two prompts", "chat, two sequences", "completion, two sequences streamed"):
        counts = counts_from_payload(payload_of(SGLANG[name]))
        assert counts.completion == sum(truth["completion"] for truth in SGLANG[name]["truth"])


@pytest.mark.parametrize(
    ("different", "cases"), [(DIFFERENT_SGLANG, SGLANG), (DIFFERENT_VLLM, VLLM)], ids=["sglang", "vllm"]
)
def test_every_listed_row_is_a_recorded_one_and_has_its_reason(different: dict[str, Other], cases: object) -> None:
    assert isinstance(cases, dict)
    assert different.keys() <= cases.keys()
    assert all(reason for reason, _ in different.values())
