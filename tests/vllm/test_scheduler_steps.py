"""The real `Scheduler` and `AsyncScheduler` with synthetic outputs: step tables whose answers stand in the test.

They run on every release of vLLM in `versions.TESTED`. What a release comes too early for is marked, and listed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from examples.vllm_demo.tiny_model import Models
from tests.vllm import versions
from tests.vllm.engine import points
from tests.vllm.scheduler import DRAFT, K, Rig
from tests.vllm.versions import Feature, has

needs = pytest.mark.needs

BLOCK = [11, 12, 13, 14, 15]


@pytest.fixture
def sync(models: Models) -> Iterator[Rig]:
    with Rig(models, "Scheduler") as rig:
        yield rig


@pytest.fixture
def asynchronous(models: Models) -> Iterator[Rig]:
    with Rig(models, "AsyncScheduler") as rig:
        yield rig


@pytest.fixture(params=["Scheduler", pytest.param("AsyncScheduler", marks=needs(Feature.ASYNC_DRAFTS))])
def either(models: Models, request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(models, request.param) as rig:
        yield rig


def totals(
    accepted: int, proposed: int, verify: int, completion: int, emitted: int, generations: int
) -> dict[str, int]:
    return {
        "accepted": accepted,
        "proposed": proposed,
        "verify": verify,
        "completion": completion,
        "emitted": emitted,
        "generations": generations,
    }


def start(rig: Rig, *request_ids: str, **settings: Any) -> None:
    """Add requests and let each get its first token by prefill: one completion token each, no draft."""
    for request_id in request_ids:
        rig.add(request_id, **settings)
    rig.step({request_id: [10] for request_id in request_ids})


def test_a_stop_inside_an_accepted_block(sync: Rig) -> None:
    start(sync, "a", stop_token_ids=[13])
    sync.draft("a")
    assert sync.step({"a": BLOCK}) == {"a": [11, 12, 13]}
    assert sync.counted() == totals(4, 4, 1, 4, 3, 1)
    assert sync.reported() == (1, 4, 4)


def test_a_stop_of_one_request_beside_a_block_of_another(sync: Rig) -> None:
    sync.add("a", stop_token_ids=[11])
    sync.add("b")
    sync.step({"a": [10], "b": [10]})
    sync.draft("a", "b")
    assert sync.step({"a": BLOCK, "b": BLOCK}) == {"a": [11], "b": BLOCK}
    assert sync.counted() == totals(8, 8, 2, 2 + 1 + 5, 1 + 5, 1)


def test_a_limit_before_the_end_of_the_drafts(sync: Rig) -> None:
    start(sync, "a", max_tokens=4)
    sync.draft("a")
    step = sync.schedule()
    # Two releases schedule no draft beyond the limit; elsewhere the block is trimmed.
    drafts = K if has(Feature.LIMITS_INSIDE) else 2
    assert step.scheduled_spec_decode_tokens == {"a": DRAFT[:drafts]}
    assert sync.update(step, {"a": BLOCK[: drafts + 1]}) == {"a": [11, 12, 13]}
    assert sync.counted() == totals(drafts, drafts, 1, 4, 3, 1)
    assert sync.reported() == (1, drafts, drafts)


def test_drafts_of_unequal_lengths(sync: Rig) -> None:
    start(sync, "a", "b", "c")
    sync.draft("a")
    sync.draft("b", tokens=[11, 12])
    step = sync.schedule()
    assert step.scheduled_spec_decode_tokens == {"a": DRAFT, "b": [11, 12]}
    sync.update(step, {"a": [11, 12, 99], "b": [11, 12, 13], "c": [11]})
    assert sync.counted() == totals(4, 6, 2, 3 + 7, 6, 0)
    assert sync.reported() == (2, 6, 4)


@needs(Feature.CLIENTS)
def test_requests_of_two_front_ends(sync: Rig) -> None:
    for client, request_id in enumerate("ab"):
        sync.add(request_id, client_index=client, stop_token_ids=[13])
    sync.step({"a": [10], "b": [10]})
    sync.draft("a", "b")
    assert sync.step({"a": BLOCK, "b": BLOCK[:2]}) == {"a": [11, 12, 13], "b": [11, 12]}
    assert set(sync.outputs) == {0, 1}
    assert sync.counted() == totals(5, 8, 2, 2 + 5, 5, 1)


def test_steps_without_drafts_are_completion_alone(sync: Rig) -> None:
    start(sync, "a")
    sync.step({"a": [11]})
    sync.step({"a": [12]})
    assert sync.counted() == totals(0, 0, 0, 3, 0, 0)


def test_all_drafts_refused_is_a_verify_step_with_zero_accepted(sync: Rig) -> None:
    start(sync, "a")
    sync.draft("a")
    sync.step({"a": [99]})
    assert sync.counted() == totals(0, 4, 1, 2, 1, 0)


@needs(Feature.ASYNC_DRAFTS, Feature.INVALID_DRAFTS)
@pytest.mark.parametrize("order", list(itertools.permutations(("r1", "r2", "r3"))), ids="".join)
def test_the_grammar_refuses_every_draft_of_one_request(asynchronous: Rig, order: tuple[str, ...]) -> None:
    # The table "one-request-all-invalid" of the handed cases, in every order of the batch.
    rig = asynchronous
    start(rig, *order)
    step = rig.schedule()
    assert step.scheduled_spec_decode_tokens == {request_id: [-1] * K for request_id in order}
    drafts = {request_id: list(DRAFT) for request_id in order}
    versions.refuse_drafts(rig.scheduler, step, drafts, valid={"r1": 4, "r2": 0, "r3": 3})
    assert step.num_invalid_spec_tokens == {"r2": 4, "r3": 1}
    rig.update(step, {"r1": [11, 12, 99], "r2": [98], "r3": [11, 97]})
    # Three tokens by prefill come on top of the table's six.
    assert rig.counted() == totals(3, 7, 2, 6 + 3, 5, 0)
    # vLLM counts the step of r2 as a draft, without a draft token: its mean acceptance length is 1 + 3/3, not 1 + 3/2.
    assert rig.reported() == (3, 7, 3)


def test_a_request_aborted_with_its_step_in_flight(either: Rig) -> None:
    start(either, "x", "y")
    if either.name == "Scheduler":
        either.draft("x", "y")
    step = either.schedule()
    either.abort("x")
    assert either.update(step, {"x": BLOCK, "y": BLOCK}) == {"y": BLOCK}
    # x has its first token, and is a generation; its verified block went to nobody.
    assert either.counted() == totals(4, 4, 1, 2 + 5, 5, 1)


@needs(Feature.ASYNC_DRAFTS)
def test_a_step_scheduled_before_the_last_one_was_seen(asynchronous: Rig) -> None:
    # One step ahead, as the engine's batch queue does: the second step is scheduled before the first is updated.
    asynchronous.add("a", stop_token_ids=[17])
    first = asynchronous.schedule()
    second = asynchronous.schedule()
    asynchronous.update(first, {"a": [10]})
    third = asynchronous.schedule()
    asynchronous.update(second, {"a": BLOCK})
    assert asynchronous.update(third, {"a": [16, 17, 18, 19, 20]}) == {"a": [16, 17]}
    assert asynchronous.counted() == totals(8, 8, 2, 8, 7, 1)


@needs(Feature.ASYNC_DRAFTS)
def test_a_stale_output_is_delivered_and_counted(asynchronous: Rig) -> None:
    start(asynchronous, "p")
    step = asynchronous.schedule()
    asynchronous.preempt("p")
    assert asynchronous.update(step, {"p": [11, 12, 13]}) == {"p": [11, 12, 13]}
    assert asynchronous.counted() == totals(2, 4, 1, 4, 3, 0)
    assert asynchronous.reported() == (1, 4, 2)


@needs(Feature.DISCARDED)
def test_a_stale_output_that_is_dropped_counts_nothing(asynchronous: Rig) -> None:
    start(asynchronous, "p")
    step = asynchronous.schedule()
    asynchronous.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert asynchronous.update(step, {"p": [11, 12, 13]}) == {}
    assert asynchronous.counted() == totals(0, 0, 0, 1, 0, 0)


def test_a_preempted_request_comes_back_without_drafts(sync: Rig) -> None:
    start(sync, "a", "b")
    sync.draft("a", "b")
    sync.preempt("b")
    step = sync.schedule()
    assert step.scheduled_spec_decode_tokens == {"a": DRAFT}
    sync.update(step, {"a": BLOCK, "b": [11]})
    assert sync.counted() == totals(4, 4, 1, 2 + 6, 5, 0)


def test_a_request_that_joins_with_one_token_to_compute(sync: Rig) -> None:
    start(sync, "a")
    sync.draft("a")
    sync.add("b", prompt=1)
    step = sync.schedule()
    padding = {"b": [-1] * K} if has(Feature.PADDING) else {}
    assert step.scheduled_spec_decode_tokens == {"a": DRAFT} | padding
    sync.update(step, {"a": BLOCK, "b": [11]})
    assert sync.counted() == totals(4, 4, 1, 1 + 6, 5, 0)


@needs(Feature.PADDING)
def test_padding_of_a_resumed_request_is_no_draft(sync: Rig) -> None:
    start(sync, "a", "b")
    # A resumed request with one token left to compute is padded; make that case by hand, as a prefix hit would.
    step = sync.schedule()
    step.scheduled_spec_decode_tokens["b"] = [-1] * K
    step.scheduled_cached_reqs.resumed_req_ids.add("b")
    sync.update(step, {"a": [16], "b": [12]})
    assert sync.counted() == totals(0, 0, 0, 2 + 2, 0, 0)


@pytest.mark.parametrize(
    "ids",
    ["a", ["a"], {"a"}, ("a",), pytest.param(None, marks=needs(Feature.ABORT_ALL))],
    ids=["str", "list", "set", "tuple", "all"],
)
def test_aborts_in_every_form_that_the_engine_gives(sync: Rig, ids: Any) -> None:
    start(sync, "a")
    sync.abort(ids)
    assert "a" not in sync.scheduler.requests
    assert sync.counted()["generations"] == 1
    sync.abort("a")
    assert sync.counted()["generations"] == 1


@needs(Feature.ABORTED_REQUESTS)
def test_an_abort_returns_what_vllm_returns(sync: Rig) -> None:
    start(sync, "a", "b")
    assert [request.request_id for request in sync.abort(["a"])] == ["a"]
    assert sync.abort("a") == []


def test_an_iterator_of_ids_reaches_the_engine_whole(sync: Rig) -> None:
    start(sync, "a", "b", "c")
    sync.abort(iter(["a", "b"]))
    assert list(sync.scheduler.requests) == ["c"]
    assert sync.counted()["generations"] == 2


def test_an_abort_in_the_queue_is_no_generation(sync: Rig) -> None:
    sync.add("a")
    sync.abort(["a"])
    assert not sync.scheduler.requests
    assert sync.counted() == totals(0, 0, 0, 0, 0, 0)


def test_a_reused_id_is_a_new_generation(sync: Rig) -> None:
    for _ in range(2):
        start(sync, "same", max_tokens=2)
        sync.step({"same": [11]})
    assert sync.counted() == totals(0, 0, 0, 4, 0, 2)


@needs(Feature.FAILED)
def test_a_request_that_fails_in_the_engine_is_settled_once(sync: Rig) -> None:
    start(sync, "a", "b")
    versions.fail(sync.scheduler, "a")
    # The step gives `a` a token, then the request fails, in one call: two outputs of one request.
    sync.draft("a", "b")
    sync.step({"a": BLOCK, "b": BLOCK})
    assert sync.counted() == totals(8, 8, 2, 2 + 10, 10, 1)


@needs(Feature.RESUMABLE)
def test_a_resumable_request_is_one_generation_however_many_turns(sync: Rig) -> None:
    sync.add("s", max_tokens=2, resumable=True)
    sync.step({"s": [10]})
    sync.draft("s")
    sync.step({"s": BLOCK})  # the turn ends at 2 tokens, with a finish reason, and the session waits
    assert sync.counted() == totals(4, 4, 1, 2, 1, 0)
    sync.add("s", max_tokens=2, prompt=70, resumable=True)  # the next turn
    sync.step({"s": [20]})
    assert sync.counted()["generations"] == 0
    sync.step({"s": [21]})
    assert sync.counted() == totals(4, 4, 1, 4, 1, 0)
    sync.add("s", resumable=False)  # the end of the session
    assert sync.counted() == totals(4, 4, 1, 4, 1, 1)


@needs(Feature.RESUMABLE)
def test_turns_that_were_there_before_the_first_one_ended(sync: Rig) -> None:
    sync.add("s", max_tokens=1, resumable=True)
    sync.add("s", max_tokens=1, prompt=70, resumable=True)
    sync.add("s", resumable=False)
    sync.step({"s": [10]})
    assert sync.counted() == totals(0, 0, 0, 1, 0, 0)
    sync.step({"s": [20]})
    assert sync.counted() == totals(0, 0, 0, 2, 0, 1)
    assert not sync.scheduler.requests


@needs(Feature.RESUMABLE)
def test_a_session_that_is_aborted_before_its_new_turn_has_a_token(sync: Rig) -> None:
    sync.add("s", max_tokens=1, resumable=True)
    sync.step({"s": [10]})
    sync.add("s", max_tokens=3, prompt=70, resumable=True)
    sync.abort("s")
    assert sync.counted() == totals(0, 0, 0, 1, 0, 1)


def test_two_data_parallel_engines_have_their_own_series(models: Models) -> None:
    with Rig(models, data_parallel_index=1) as rig:
        start(rig, "a")
        indices = {attributes["specdec.engine.index"] for _, attributes, _ in points(rig.reader)}
        assert indices == {1}
        assert all(a["specdec.process"].startswith("engine-1") for _, a, _ in points(rig.reader))


@needs(Feature.DIFFUSION)
def test_diffusion_is_left_out(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    # Diffusion models use the draft fields for a canvas, and sample no token of their own.
    from vllm.config import ModelConfig

    rig = Rig(models)
    monkeypatch.setattr(ModelConfig, "is_diffusion", property(lambda self: True))
    with rig:
        assert rig.scheduler.num_sampled_tokens_per_step == 0
        rig.add("d")
        rig.step({"d": [10]})
        assert points(rig.reader) == []


def test_instrumenting_a_scheduler_that_is_already_at_work(sync: Rig) -> None:
    from otel_specdec import VLLMSpecDecInstrumentor

    start(sync, "a")
    VLLMSpecDecInstrumentor().uninstrument()
    sync.draft("a")
    sync.step({"a": BLOCK})  # nobody counts this one
    VLLMSpecDecInstrumentor().instrument(meter_provider=sync.provider)
    sync.draft("a")
    sync.step({"a": BLOCK})
    assert sync.counted() == totals(4, 4, 1, 1 + 5, 5, 0)


def test_uninstrument_leaves_vllm_as_it_was(models: Models) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    before = {name: vars(Scheduler)[name] for name in ("__init__", "update_from_output", "finish_requests")}
    with Rig(models) as rig:
        assert all(vars(Scheduler)[name] is not original for name, original in before.items())
        start(rig, "a")
    assert {name: vars(Scheduler)[name] for name in before} == before
    # What was pending is in the next collection.
    assert rig.counted()["completion"] == 1
