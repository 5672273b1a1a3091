"""Other ways to speculate, and none, on the real engine.

Each engine has a process of its own: a second `LLM` in one process fails in vLLM 0.32 itself (it registers its kernel
overrides again, over all loaded modules, and trips over what the first has left there).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from examples.vllm_demo.tiny_model import Models
from tests.vllm.engine import ALPHABET, K, running_engine


def in_its_own_process(case: Callable[..., None], *args: Any) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(case, *args).result(timeout=300)


def sampling(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0} | settings))


def preemption(models: Models) -> None:
    # Each needs up to 7 blocks of 32 tokens, and shares none with another: they begin at different letters.
    with running_engine(models, max_num_seqs=12, block_size=32, num_gpu_blocks_override=40) as engine:
        prompts = [(ALPHABET[n:] + ALPHABET[:n]) * 4 + ALPHABET[n : n + 2] for n in range(12)]
        sequences = engine.generate(prompts, sampling(max_tokens=80))
        counted = engine.check(sequences)
        assert counted["generations"] == 12, counted
        assert engine.reported()["preemptions"] > 0


def test_preemption_of_twelve_requests_loses_and_doubles_nothing(models: Models) -> None:
    in_its_own_process(preemption, models)


def draft_model(models: Models, method: str) -> None:
    drafter = models.draft if method == "draft_model" else models.eagle
    speculation = {"method": method, "model": str(drafter), "num_speculative_tokens": K}
    with running_engine(models, speculation) as engine:
        sequences = engine.generate([ALPHABET + "ab", "UVWXYZaaUV", "0123"], sampling(max_tokens=37))
        counted = engine.check(sequences)
        reported = engine.reported()
        assert reported["accepted"] == counted["accepted"] > 0, reported
        assert reported["proposed"] == counted["proposed"], reported
        assert {attributes["specdec.method"] for _, attributes, _ in engine.points()} == {method}


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_model(models: Models, method: str) -> None:
    in_its_own_process(draft_model, models, method)


def no_speculation(models: Models) -> None:
    with running_engine(models, None) as engine:
        sequences = engine.generate([ALPHABET + "ab"], sampling(max_tokens=20))
        assert len(sequences[0].token_ids) == 20
        assert engine.points() == []


def test_without_speculation_there_is_not_one_point(models: Models) -> None:
    in_its_own_process(no_speculation, models)
