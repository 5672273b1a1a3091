"""An agentic rollout: an agent forks, two branches share their beginning, a third one leads nowhere and is discarded.

Trainers want one trajectory for each leaf, so the beginning is exported twice, and whoever sums over trajectories
counts it twice. A `RolloutSession` holds the tree; each generation is counted once, however often it is exported.
"""

from __future__ import annotations

from typing import Any

import httpx
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.rollouts.replay import Replay, cases
from otel_specdec import BatchSummary, GenerationReport, RolloutSession, SpecDecRecorder, pool, reports_from_payload


class Agent:
    """Asks an OpenAI-compatible server; each turn is one generation."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def turn(self, path: str, request: dict[str, Any]) -> GenerationReport:
        answer = self._client.post(path, json=request)
        answer.raise_for_status()
        (report,) = reports_from_payload(answer.json())
        return report


def rollout(url: str, turns: list[tuple[str, dict[str, Any]]], session: RolloutSession) -> None:
    """The first turn, then a branch for each of the others but the last, which is tried and given up."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        agent = Agent(client)
        beginning = session.branch()
        beginning.add(agent.turn(*turns[0]))
        beginning.commit()
        for turn in turns[1:-1]:
            branch = session.branch(after=beginning.tip)
            branch.add(agent.turn(*turn))
            branch.commit()
        dead_end = session.branch(after=beginning.tip)
        dead_end.add(agent.turn(*turns[-1]))
        dead_end.discard()


def count(session: RolloutSession, recorder: SpecDecRecorder) -> BatchSummary:
    """Count what a trainer is given: one trajectory for each leaf, the shared beginning with each of them."""
    return recorder.record_batch(report for trajectory in session.trajectories() for report in trajectory)


def main() -> None:
    reader = InMemoryMetricReader()
    recorder = SpecDecRecorder(MeterProvider([reader]))
    recorded = cases("vllm")
    names = ["chat", "completion", "drafts partly right", "drafts wrong"]
    turns = [(recorded[name]["path"], dict(recorded[name]["request"])) for name in names]
    session = RolloutSession("task 1")
    with Replay("vllm") as server:
        rollout(server.url, turns, session)
    summary = count(session, recorder)
    print(f"{len(session.trajectories())} trajectories, {summary.reports} reports, {summary.generations} generations")
    print(f"accepted {summary.totals['accepted']} of {summary.totals['proposed']}: {summary.ratios['accept_rate']:.4f}")
    (pooled,) = pool(reader.get_metrics_data())
    print(f"the counters say the same: {pooled.ratios['accept_rate']:.4f} of {pooled.generations} generations")


if __name__ == "__main__":
    main()
