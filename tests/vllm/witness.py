"""An independent count of speculative decoding, made from the scheduler's own inputs and outputs.

It shares no rule with the code under test: a draft token is real if it is not -1 (the synchronous scheduler has the
real ids), accepted tokens are those that the draft and the target model agree on, one by one (greedy), and
generations are counted by looking at the request objects in the end. It sits beneath our hooks, so both see the same
calls.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Witness:
    """What happened since the last `reset`, by the names of `SpecCounts`; positions by draft position."""

    counts: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    proposed_at: Counter[int] = field(default_factory=Counter)
    seen: dict[int, Any] = field(default_factory=dict)  # id(request) -> request, kept alive, with tokens
    padded_steps: int = 0
    skipped_steps: int = 0
    preempted: set[str] = field(default_factory=set)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def generations(self) -> int:
        return sum(request.is_finished() for request in self.seen.values())

    def totals(self) -> dict[str, int]:
        names = ("accepted", "proposed", "verify", "completion", "emitted")
        return {name: self.counts[name] for name in names} | {"generations": self.generations}

    def step(self, requests: dict[str, Any], step: Any, sampled: dict[str, list[int]], result: Any) -> None:
        emitted: Counter[str] = Counter()
        for outputs in result.values():
            for output in outputs.outputs:
                emitted[output.request_id] += len(output.new_token_ids)
        for request_id, tokens in sampled.items():
            drafts = list(step.scheduled_spec_decode_tokens.get(request_id, ()))
            real = [token for token in drafts if token != -1]
            if not emitted[request_id]:
                self.skipped_steps += bool(tokens)
                continue
            self.seen[id(requests[request_id])] = requests[request_id]
            self.counts["completion"] += emitted[request_id]
            self.padded_steps += bool(drafts) and not real
            if not real:
                continue
            agreed = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(real, tokens, strict=False))
            )
            if requests[request_id].sampling_params.temperature > 0:
                # Where tokens are sampled, the one that takes a refused draft's place may be equal to it.
                assert agreed >= len(tokens) - 1
                agreed = len(tokens) - 1
            self.counts.update(accepted=agreed, proposed=len(real), verify=1, emitted=emitted[request_id])
            self.accepted_at.update(range(agreed))
            self.proposed_at.update(range(len(real)))


@contextmanager
def witnessing() -> Iterator[Witness]:
    """Patch vLLM's scheduler beneath whatever is installed later; imports vllm."""
    from vllm.v1.core.sched.scheduler import Scheduler

    witness = Witness()
    original = Scheduler.update_from_output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        requests = dict(self.requests)
        rows = model_runner_output.req_id_to_index
        sampled = model_runner_output.sampled_token_ids
        before = {
            request_id: list(sampled[rows[request_id]]) if len(sampled) else []
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in requests and request_id in rows
        }
        witness.preempted |= scheduler_output.preempted_req_ids or set()
        result = original(self, scheduler_output, model_runner_output)
        witness.step(requests, scheduler_output, before, result)
        return result

    Scheduler.update_from_output = update_from_output
    try:
        yield witness
    finally:
        Scheduler.update_from_output = original
