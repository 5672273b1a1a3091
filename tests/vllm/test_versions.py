"""What this release of vLLM has and lacks is what `versions.ABSENT` says: no table is left out that could be run."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest

from examples.vllm_demo.tiny_model import Models
from otel_specdec.engines import vllm_front_end
from otel_specdec.engines.hooking import is_hook
from tests.vllm import versions
from tests.vllm.scheduler import DRAFT, K, Rig
from tests.vllm.versions import Feature


@pytest.fixture
def rig(models: Models) -> Iterator[Rig]:
    with Rig(models) as rig:
        yield rig


def request_takes(name: str) -> bool:
    from vllm.v1.request import Request

    return name in inspect.signature(Request).parameters


def started(rig: Rig, **settings: int) -> Rig:
    rig.add("a", **settings)
    rig.step({"a": [10]})
    return rig


def lists(_: Rig) -> bool:
    from vllm.v1.outputs import ModelRunnerOutput

    return "ndarray" not in str({field.name: field.type for field in fields(ModelRunnerOutput)}["sampled_token_ids"])


def limits_inside(rig: Rig) -> bool:
    started(rig, max_tokens=3).draft("a")
    return bool(rig.schedule().scheduled_spec_decode_tokens == {"a": DRAFT})


def async_drafts(rig: Rig) -> bool:
    try:
        kind = versions.scheduler_class("AsyncScheduler")
    except ImportError:
        return False
    rig.scheduler = rig.make(kind)
    return bool(started(rig).schedule().scheduled_spec_decode_tokens == {"a": [-1] * K})


def resumed_ids(_: Rig) -> bool:
    from vllm.v1.core.sched.output import CachedRequestData

    return "resumed_req_ids" in {field.name for field in fields(CachedRequestData)}


def discarded(rig: Rig) -> bool:
    return "reset_running_requests" in inspect.signature(rig.scheduler.reset_prefix_cache).parameters


def invalid_drafts(_: Rig) -> bool:
    from vllm.v1.core.sched.output import SchedulerOutput

    return "num_invalid_spec_tokens" in {field.name for field in fields(SchedulerOutput)}


def random_ids(_: Rig) -> bool:
    from vllm.v1.engine import EngineCoreRequest

    return "external_req_id" in EngineCoreRequest.__struct_fields__


def abort_all(rig: Rig) -> bool:
    try:
        started(rig).abort(None)
    except TypeError:
        return False
    return not rig.scheduler.requests


def padding(rig: Rig) -> bool:
    started(rig).draft("a")
    rig.add("b", prompt=1)
    return "b" in rig.schedule().scheduled_spec_decode_tokens


def lone_padding(rig: Rig) -> bool:
    # By its condition: it takes a prefix cache, and the tests of the real engine see it happen.
    return "scheduled_running_reqs or num_computed_tokens > 0" in inspect.getsource(type(rig.scheduler).schedule)


def trimmed_stops(_: Rig) -> bool:
    from vllm.v1.engine.output_processor import OutputProcessor

    return hasattr(OutputProcessor, "_trim_surplus_tokens")


def aborted_requests(rig: Rig) -> bool:
    taken = started(rig).abort("a")
    return [getattr(request, "request_id", None) for request in taken or ()] == ["a"]


HAS: dict[Feature, Callable[[Rig], bool]] = {
    Feature.CLIENTS: lambda _: request_takes("client_index"),
    Feature.LISTS: lists,
    Feature.LIMITS_INSIDE: limits_inside,
    Feature.DRAFT_UPDATES: lambda rig: hasattr(rig.scheduler, "update_draft_token_ids"),
    Feature.ASYNC_DRAFTS: async_drafts,
    Feature.RESUMED_IDS: resumed_ids,
    Feature.DISCARDED: discarded,
    Feature.INVALID_DRAFTS: invalid_drafts,
    Feature.ENGINE_INDEX: lambda rig: hasattr(rig.config.parallel_config, "data_parallel_index"),
    Feature.RANDOM_IDS: random_ids,
    Feature.RESUMABLE: lambda _: request_takes("resumable"),
    Feature.ABORT_ALL: abort_all,
    Feature.DIFFUSION: lambda rig: hasattr(rig.scheduler, "num_sampled_tokens_per_step"),
    Feature.PADDING: padding,
    Feature.FAILED: lambda rig: hasattr(rig.scheduler, "grammar_compile_error_reqs"),
    Feature.ABORTED_REQUESTS: aborted_requests,
    Feature.STALE_OUTPUTS: lambda rig: hasattr(rig.add("a"), "num_stale_output_tokens"),
    Feature.SESSION_IDS: lambda _: request_takes("session_id"),
    Feature.LONE_PADDING: lone_padding,
    Feature.TRIMMED_STOPS: trimmed_stops,
}


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name.lower())
def test_a_release_lacks_what_the_list_says_and_nothing_else(rig: Rig, feature: Feature) -> None:
    assert HAS[feature](rig) == versions.has(feature)


def test_the_front_end_of_every_release_is_as_the_hooks_know_it(rig: Rig) -> None:
    for module, (kind, method, _, _) in vllm_front_end.PLACES.items():
        owner = getattr(importlib.import_module(module), kind)
        assert is_hook(vars(owner)[method]), (module, kind, method)


def test_this_release_is_one_of_the_matrix() -> None:
    import vllm

    assert versions.installed() in versions.TESTED
    assert vllm.__version__ == versions.installed()
