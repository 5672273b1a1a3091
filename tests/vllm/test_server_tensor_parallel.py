"""Tensor parallelism on the real server: the engine counts, its workers count nothing.

Runs with nothing beside it, see `ALONE` in tests/run.py.
"""

from __future__ import annotations

from pathlib import Path

from examples.vllm_demo.tiny_model import Models
from tests.vllm.serving import check_attributes, check_two_hundred_of_three_tokens, serving


def test_two_tensor_parallel_workers_are_one_engine(models: Models, tmp_path: Path) -> None:
    # On one NUMA node vLLM's CPU backend starts with two workers only if each is told its cores.
    with serving(
        models,
        tmp_path,
        extra_args=["--tensor-parallel-size", "2"],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as served:
        check_two_hundred_of_three_tokens(served)
        check_attributes(served, {0})
