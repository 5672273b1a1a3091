"""Random traffic on vLLM's real scheduler: any mix of drafts, acceptances, lengths, ends and aborts is counted exactly.

The hour of it is tests/benchmarks/soak.py.
"""

from __future__ import annotations

import pytest

from examples.vllm_demo.tiny_model import Models
from tests.benchmarks.soak import Clock, Traffic
from tests.vllm.engine import points
from tests.vllm.scheduler import Rig


@pytest.mark.parametrize("seed", [1, 2])
def test_every_total_is_exact_at_every_collection(models: Models, seed: int) -> None:
    with Rig(models, max_num_seqs=256) as rig:
        traffic = Traffic(rig, Clock())
        traffic.draw.seed(seed)
        for _ in range(6):
            for _ in range(25):
                traffic.step()
            assert rig.counted() == traffic.truth
        assert traffic.truth["generations"] > 1_000
        assert not [name for name, _, _ in points(rig.reader) if name == "specdec.instrumentation.errors"]
