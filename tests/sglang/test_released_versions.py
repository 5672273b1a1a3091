"""Released versions, from 0.4.6 to the one that is installed: what each can tell, on its own classes and methods."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from otel_specdec import SGLangSpecDecInstrumentor
from tests.sglang.released import INSTALLED, load, message
from tests.unit.collected import Meter

VERSIONS = ("0.4.6", "0.4.9", "0.5.1", "0.5.4", "0.5.9", "0.5.14", "0.5.18", INSTALLED)
NAMES = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accepted_tokens")
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_acceptance_histogram")
CHAIN = {"speculative_eagle_topk": 1, "speculative_num_steps": 3}
CASES: dict[str, dict[str, Any]] = {
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "NGRAM, no overlap": {"speculative_algorithm": "NGRAM", "disable_overlap_schedule": True},
    "chain": {"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True, **CHAIN},
    "chain, overlap": {"speculative_algorithm": "EAGLE", "disable_overlap_schedule": False, **CHAIN},
    "tree": {"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True, "speculative_eagle_topk": 2},
}
SEEN = {
    "verify": 4,
    "accepted": 6,
    "completion": 10,
    "proposed": 12,
    "emitted": 9,
    "generations": 1,
}


def known(version: str, case: str) -> set[str]:
    """The table of the docs: what is known, besides verify steps, completion tokens and generations."""
    released = tuple(map(int, version.split("."))) if version != INSTALLED else (99,)
    found = {"verify", "completion", "generations"}
    if released >= (0, 5, 9) or (released >= (0, 5, 4) and case in ("chain", "tree")):
        found.add("accepted")
    if released >= (0, 5, 9):
        found.add("emitted")
    if case.startswith("chain"):
        found.add("proposed")
    return found


@pytest.fixture(autouse=True)
def nothing_of_sglang_stays() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    if SGLangSpecDecInstrumentor().is_instrumented_by_opentelemetry:
        SGLangSpecDecInstrumentor().uninstrument()
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] == "sglang":
            del sys.modules[name]


class Released:
    """One version's response path, instrumented, with one request."""

    def __init__(self, version: str, **settings: Any) -> None:
        self.module = load(version)
        self.meter = Meter(resource={"service.instance.id": "here"})
        SGLangSpecDecInstrumentor().instrument(meter_provider=self.meter.provider, skip_dep_check=True)
        arguments = {
            "served_model_name": "tiny",
            "speculative_num_draft_tokens": 4,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": None,
            "disaggregation_mode": "null",
            "enable_mixed_chunk": False,
            "skip_tokenizer_init": False,
            "stream_output": False,
            "weight_version": "default",
            "enable_lora": False,
            "batch_notify_size": 16,
            "incremental_streaming_output": False,
            "dp_size": 1,
            **settings,
        }
        self.manager = self.module.TokenizerManager(
            rid_to_state={},
            served_model_name="tiny",
            server_args=SimpleNamespace(**arguments),
            enable_metrics=False,
            enable_lora=False,
            dump_requests_folder="",
            crash_dump_folder=None,
            skip_tokenizer_init=False,
            incremental_streaming_output=False,
            lora_registry=MagicMock(),
            send_to_scheduler=MagicMock(),
            config_value=lambda name: "default",
            _release_lora_once=lambda state: None,
            convert_to_span_attrs=MagicMock(),
            asyncio_tasks=set(),
        )

    def add(self, rid: str) -> Any:
        fields = self.module.ReqState.__dataclass_fields__
        obj = SimpleNamespace(
            rid=rid, stream=False, log_metrics=False, sampling_params={}, input_embeds=None, lora_path=None,
            return_sampling_mask=False,
        )  # fmt: skip
        values: dict[str, Any] = {
            "out_list": [], "finished": False, "event": asyncio.Event(), "obj": obj, "created_time": 0.0,
            "time_stats": MagicMock(first_token_time=1.0, trace_ctx=SimpleNamespace(tracing_enable=False)),
        }  # fmt: skip
        state = self.module.ReqState(**{name: value for name, value in values.items() if name in fields})
        self.manager.rid_to_state[rid] = state
        return state

    def says(self, rid: str, *, kind: str = "BatchStrOut", reason: Any = None, **columns: Any) -> None:
        cls = getattr(self.module, kind, None) or getattr(self.module, f"{kind}put")
        values = {
            "completion_tokens": [10],
            "spec_verify_ct": [4],
            **{name: [6] for name in NAMES},
            **{name: [[1, 1, 1, 1]] for name in HISTOGRAMS},
            "retraction_counts": [0],
            **columns,
        }
        received = message(
            cls,
            rids=[rid],
            finished_reasons=[reason],
            output_strs=["x"],
            output_ids=[[1]],
            prompt_tokens=[3],
            cached_tokens=[0],
            reasoning_tokens=[0],
            **values,
        )
        result = self.manager._handle_batch_output(received)
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))


async def _awaited(result: Any) -> None:
    await result


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_version_tells(version: str, case: str) -> None:
    released = Released(version, **CASES[case])
    state = released.add("a")
    for kind in ("BatchStrOut", "BatchTokenIDOut"):
        released.manager.rid_to_state["a"] = state
        state.finished = False
        released.says("a", kind=kind, reason={"type": "length", "length": 10})
        assert state.finished  # the version's own method has run
    assert released.meter.errors() == {}
    expected = {name: 2 * value for name, value in SEEN.items() if name in known(version, case)}
    assert released.meter.totals() == expected
    positions = released.meter.at_positions()
    histogram = {"accepted", "proposed"} <= known(version, case) and version not in ("0.5.4",)
    if case.startswith("chain"):
        assert positions == (([6, 4, 2], [8, 8, 8]) if histogram else ([0, 0, 0], [0, 0, 0]))
    else:
        assert positions == ([], [])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_method_is_as_it_was_a_coroutine_or_not(version: str) -> None:
    module = load(version)
    original = vars(module.TokenizerManager)["_handle_batch_output"]
    assert inspect.iscoroutinefunction(original) is (version in ("0.5.14", "0.5.18", INSTALLED))
    SGLangSpecDecInstrumentor().instrument(meter_provider=Meter().provider, skip_dep_check=True)
    assert vars(module.TokenizerManager)["_handle_batch_output"].__wrapped__ is original


@pytest.mark.parametrize("collected", [True, False], ids=["collected", "at once"])
@pytest.mark.parametrize("version", VERSIONS)
def test_partial_messages_and_the_end_of_a_request_without_one(version: str, collected: bool) -> None:
    """Aborted in the queue after a retraction; before 0.4.9 any abort deletes the state. Then the same id again."""
    released = Released(version, **CASES["tree"])
    released.add("a")
    released.says("a")
    if collected:
        assert released.meter.totals()["generations"] == 0
        assert released.meter.totals()["verify"] == 4
    if version == "0.4.6":
        released.manager.abort_request("a")
    else:
        released.manager._handle_abort_req(
            SimpleNamespace(rid="a", abort_message="", finished_reason=None, weight_versions=None)
        )
    # From 0.4.9 to 0.5.9 the state is finished and stays until whoever waits for the answer deletes it.
    assert version != "0.5.9" or released.manager.rid_to_state["a"].finished
    if collected:
        assert released.meter.totals()["generations"] == 1
    released.add("a")
    released.says(
        "a",
        reason={"type": "stop"},
        spec_verify_ct=[1],
        completion_tokens=[2],
        spec_num_correct_drafts=[0],
        spec_accepted_tokens=[0],
    )
    assert released.meter.totals()["generations"] == 2
    assert released.meter.totals()["verify"] == 5
    assert released.meter.totals()["completion"] == 12


@pytest.mark.parametrize("version", VERSIONS)
def test_without_speculation_there_is_not_one_point(version: str) -> None:
    released = Released(version, speculative_algorithm=None)
    released.add("a")
    nothing: dict[str, Any] = {name: [] for name in (*NAMES, *HISTOGRAMS)}
    released.says("a", spec_verify_ct=[], **nothing)
    assert released.meter.points() == []


def test_the_docs_table_is_this_one() -> None:
    docs = Path("docs/sglang.md").read_text()
    rows = dict(re.findall(r"^\| (0\.\d+\.\d+)[^|]*\|(.*)\|$", docs, re.MULTILINE))
    newest = importlib.metadata.version("sglang")
    for version in (*VERSIONS[:-1], newest):
        asked = INSTALLED if version == newest else version
        cells = [cell.strip() for cell in rows[version].split("|")]
        said = dict(zip(("verify", "accepted", "proposed", "emitted"), cells, strict=False))
        assert said["verify"] == "yes"
        accepted = [case for case in CASES if "accepted" in known(asked, case)]
        assert said["accepted"] == (
            "no" if not accepted else "yes" if len(accepted) == len(CASES) else "EAGLE without overlap"
        )
        assert said["proposed"] == "fixed chain"
        assert said["emitted"] == ("yes" if "emitted" in known(asked, "NGRAM") else "no")
