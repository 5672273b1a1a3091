"""The real engine with n-gram speculation, k = 4, in this process: every figure against an independent count.

Where a figure stands in the test, it was measured before by probes that share no code with this project, on the same
transitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.vllm_demo.tiny_model import Models
from otel_specdec import pool
from tests.vllm.engine import ALPHABET, Engine, K, running_engine
from tests.vllm.versions import Feature, has

PROMPT = ALPHABET + "ab"


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Engine]:
    with running_engine(models) as engine:
        yield engine


def sampling(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0} | settings))


def structured(**settings: Any) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**settings)


def lengths(counted: dict[str, int]) -> float:
    return counted["emitted"] / counted["verify"]


@pytest.mark.parametrize(
    ("max_tokens", "acceptance_length"), [(2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0), (6, 5.0), (7, 3.0), (11, 5.0)]
)
def test_a_length_limit_trims_what_the_steps_emit(engine: Engine, max_tokens: int, acceptance_length: float) -> None:
    sequences = engine.generate([PROMPT], sampling(max_tokens=max_tokens))
    counted = engine.check(sequences)
    assert lengths(counted) == acceptance_length
    # vLLM counts a step's accepted tokens before it trims: it reports 5.0 for every one of these.
    reported = engine.reported()
    assert 1 + reported["accepted"] / reported["drafts"] == 5.0
    assert (reported["accepted"], reported["proposed"]) == (counted["accepted"], counted["proposed"])


def test_partial_acceptance(engine: Engine) -> None:
    counted = engine.check(engine.generate(["abcdexxxabcdefgyyyab"], sampling(max_tokens=24)))
    assert 0 < counted["accepted"] < counted["proposed"]
    reported = engine.reported()
    assert (reported["accepted"], reported["proposed"]) == (counted["accepted"], counted["proposed"])


def test_eos_inside_a_block(engine: Engine) -> None:
    sequences = engine.generate(["UVWXYZ</s>aaUV"], sampling(max_tokens=40))
    assert sequences[0].finish_reason == "stop"
    assert lengths(engine.check(sequences)) == 4.0
    assert 1 + engine.reported()["accepted"] / 1 == 5.0


def test_a_stop_token_inside_a_block(engine: Engine) -> None:
    sequences = engine.generate([PROMPT], sampling(max_tokens=40, stop_token_ids=[engine.token("i")]))
    assert sequences[0].finish_reason == "stop"
    assert lengths(engine.check(sequences)) == 3.0


def test_a_stop_string_is_trimmed_behind_the_engine(engine: Engine) -> None:
    # The engine commits 11 tokens. The client gets 8: the text "cdefgh" and the tokens of the stop string with it.
    # Before 0.32 it got that text, and all of the tokens.
    sequences = engine.generate([PROMPT], sampling(max_tokens=40, stop=["ij"]))
    assert engine.check()["completion"] == 11
    assert sequences[0].text == "cdefgh"
    assert len(sequences[0].token_ids) == (8 if has(Feature.TRIMMED_STOPS) else 11)


def test_min_tokens_holds_a_stop_token_back(engine: Engine) -> None:
    stop = sampling(max_tokens=40, min_tokens=8, stop_token_ids=[engine.token("f")])
    engine.check(engine.generate([PROMPT], stop))


@pytest.mark.parametrize(
    ("prompt", "grammar"),
    [
        (PROMPT, {"choice": ["cdxy", "zzz"]}),
        (PROMPT, {"regex": "cdef[0-9]{4}gh"}),
        (PROMPT, {"regex": "cdefg"}),
        (
            '{"a": 1, "b": 2}{"a": 1, "b": 2}{',
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            },
        ),
    ],
    ids=["choice", "regex", "regex-ends-in-a-draft", "json"],
)
def test_grammars(engine: Engine, prompt: str, grammar: dict[str, Any]) -> None:
    sequences = engine.generate([prompt], sampling(max_tokens=30, structured_outputs=structured(**grammar)))
    counted = engine.check(sequences)
    reported = engine.reported()
    assert (reported["accepted"], reported["proposed"]) == (counted["accepted"], counted["proposed"])


def test_json_capped_by_length(engine: Engine) -> None:
    grammar = structured(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    prompt = '{"a": 1, "b": 2}{"a": 1, "b": 2}{'
    counted = engine.check(engine.generate([prompt], sampling(max_tokens=30, structured_outputs=grammar)))
    assert counted["emitted"] <= counted["accepted"] + counted["verify"]


def test_three_children_of_one_request_are_three_generations(engine: Engine) -> None:
    sequences = engine.generate([PROMPT], sampling(n=3, temperature=0.01, max_tokens=13))
    assert len(sequences) == 3
    assert engine.check(sequences)["generations"] == 3


def test_chunked_prefill_emits_nothing_before_its_end(engine: Engine) -> None:
    prompt = ALPHABET * 8 + "ab"  # 210 tokens, 64 a step
    engine.check(engine.generate([prompt], sampling(max_tokens=11)))


def test_padding_after_a_prefix_cache_hit_is_no_draft(engine: Engine) -> None:
    prompt = {"prompt_token_ids": engine.ids(ALPHABET * 6)[:129]}
    engine.check(engine.generate([prompt], sampling(max_tokens=11)))
    # The second time 128 tokens come from the cache and one is left: vLLM pads that step with k times -1 (some releases
    # only if others run too), and counts the padding as a draft.
    padded = 1 if has(Feature.LONE_PADDING) else 0
    counted = engine.check(engine.generate([prompt], sampling(max_tokens=11)))
    assert engine.witness.padded_steps == padded
    assert (counted["verify"], counted["proposed"], counted["accepted"]) == (2, 8, 8)
    reported = engine.reported()
    assert (reported["drafts"], reported["proposed"], reported["accepted"]) == (2 + padded, 8 + K * padded, 8)


def stepping(engine: Engine, request_id: str, steps: int) -> tuple[list[str], int]:
    """Add a long request and take some steps: the scheduler's ids of it, and how many tokens the client has."""
    from vllm.sampling_params import RequestOutputKind

    llm_engine = engine.llm.llm_engine
    prompt = {"prompt_token_ids": engine.ids(PROMPT)}
    llm_engine.add_request(request_id, prompt, sampling(max_tokens=200, output_kind=RequestOutputKind.DELTA))
    got = sum(len(output.outputs[0].token_ids) for _ in range(steps) for output in llm_engine.step())
    return list(engine.scheduler.requests), got


def test_a_one_token_prompt_that_joins_a_running_request_is_padded_too(engine: Engine) -> None:
    engine.start()
    stepping(engine, "running", steps=2)
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("joins", {"prompt_token_ids": [68]}, sampling(max_tokens=12))
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    assert engine.check()["generations"] == 2
    assert engine.witness.padded_steps == has(Feature.PADDING)


def test_an_abort_between_steps_settles_the_generation(engine: Engine) -> None:
    engine.start()
    _, got = stepping(engine, "between", steps=4)
    engine.llm.llm_engine.abort_request(["between"], internal=False)
    engine.llm.llm_engine.step()
    counted = engine.check()
    assert counted["generations"] == 1
    assert counted["completion"] == got == 16


def test_an_abort_while_the_model_runs_drops_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.start()
    internal, got = stepping(engine, "during", steps=3)
    execute = engine.core.model_executor.execute_model

    def abort_meanwhile(*args: Any, **kwargs: Any) -> Any:
        result = execute(*args, **kwargs)
        engine.core.aborts_queue.put_nowait(internal)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.model_executor, "execute_model", abort_meanwhile)
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(["during"], internal=False)
    counted = engine.check()
    assert engine.witness.skipped_steps in (0, 1)  # the scheduler gives its output to nobody
    assert counted["generations"] == 1
    assert counted["completion"] == got


def test_an_abort_in_the_queue_is_no_generation(engine: Engine) -> None:
    engine.start()
    stepping(engine, "queued", steps=0)
    engine.llm.llm_engine.abort_request(["queued"], internal=False)
    engine.llm.llm_engine.step()
    assert set(engine.check().values()) == {0}


def test_what_a_running_generation_has_done_is_in_a_collection(engine: Engine) -> None:
    engine.start()
    _, got = stepping(engine, "running", steps=3)
    counted = engine.counted()
    assert counted["completion"] == got > 0
    assert counted["generations"] == 0
    engine.llm.llm_engine.abort_request(["running"], internal=False)
    engine.llm.llm_engine.step()


def test_the_attributes_of_every_point(engine: Engine) -> None:
    model = engine.llm.llm_engine.vllm_config.model_config.served_model_name
    for name, attributes, _ in engine.points():
        assert attributes["gen_ai.provider.name"] == "vllm"
        assert attributes["gen_ai.request.model"] == model
        assert attributes["specdec.method"] == "ngram"
        assert attributes["specdec.source"] == "engine"
        front_end = name == "specdec.trimmed_tokens"
        assert attributes.get("specdec.engine.index") == (None if front_end else 0)
        assert str(attributes["specdec.process"]).startswith("api-0" if front_end else "engine-0")
        assert ("specdec.position" in attributes) == (".position." in name)
        assert ("specdec.ratio_set" in attributes) == (".position." not in name and not front_end)


def test_an_engine_has_at_most_twenty_series(engine: Engine) -> None:
    by_engine = [name for name, _, _ in engine.points() if name != "specdec.trimmed_tokens"]
    assert len(by_engine) == 6 + 2 * 4
    assert len(engine.points()) == len(by_engine) + 1  # and one of the front end


def test_every_ratio_covers_every_generation(engine: Engine) -> None:
    (pooled,) = pool(engine.reader.get_metrics_data(), by=("gen_ai.request.model",))
    assert pooled.coverage == {"acceptance_length": 1.0, "accept_rate": 1.0, "tokens_per_verify": 1.0}
    assert list(pooled.accept_rate_by_position) == [0, 1, 2, 3]
