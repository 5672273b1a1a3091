"""A rollout function in the manner of slime, miles and Relax: each sample's counters from SGLang's native responses.

What such frameworks publish as `spec_accept_rate` is a mean of ratios over samples, with 0.0 for those that have no
counters. Here every response becomes a report, a sample carries its reports through JSON as it carries everything else,
and a step is counted with one call; ranks send their summaries, which add up. A generation that was interrupted and
went on in a later step (partial rollout) is one generation: its parts are added, and it is counted when it ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.rollouts.replay import Replay, cases
from otel_specdec import BatchSummary, GenerationReport, SpecCounts, SpecDecRecorder, counts_from_payload, pool


@dataclass
class Sample:
    """What a framework keeps of a sample, cut down to what matters here."""

    index: int
    request: dict[str, Any]
    response: str = ""
    status: str = "pending"
    started_in: int | None = None
    """The rollout step in which its generation began: with the index it is the generation's identity."""
    so_far: dict[str, int | None] | None = None
    """The counts of the parts of an interrupted generation."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """`GenerationReport.as_dict()` of each finished generation."""


async def generate(client: httpx.AsyncClient, sample: Sample, step: int) -> Sample:
    """Send one request, and keep what its response says of the generation."""
    answer = await client.post("/generate", json=sample.request)
    answer.raise_for_status()
    output = answer.json()
    sample.response += output["text"]
    sample.started_in = step if sample.started_in is None else sample.started_in

    counts = counts_from_payload(output)
    if sample.so_far is not None:
        counts = SpecCounts(**sample.so_far).plus(counts)
    if output["meta_info"]["finish_reason"]["type"] == "abort":
        sample.status, sample.so_far = "aborted", counts.as_dict()  # goes on in a later step
        return sample
    sample.status, sample.so_far = "completed", None
    report = GenerationReport(
        f"sample {sample.index}",
        counts,
        session_id=f"step {sample.started_in}",
        sample_id=str(sample.index),
        model="tiny",
        provider="sglang",
        method="ngram",
    )
    sample.reports.append(report.as_dict())
    return sample


async def generate_rollout(url: str, samples: Sequence[Sample], step: int, recorder: SpecDecRecorder) -> BatchSummary:
    """One rollout step: generate all samples, and count those that are complete."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await asyncio.gather(*(generate(client, sample, step) for sample in samples))
    # A sample's reports have been through JSON wherever samples are stored or sent.
    stored = json.loads(json.dumps([sample.reports for sample in samples]))
    return recorder.record_batch(GenerationReport.from_dict(report) for reports in stored for report in reports)


def merged(ranks: Sequence[str]) -> BatchSummary:
    """What all ranks did, from the JSON that each of them sent: sums, so there is nothing to average."""
    summaries = [BatchSummary.from_dict(json.loads(rank)) for rank in ranks]
    total = summaries[0]
    for summary in summaries[1:]:
        total = total.merge(summary)
    return total


def main() -> None:
    reader = InMemoryMetricReader()
    recorder = SpecDecRecorder(MeterProvider([reader]), speculation=True)
    asked = [case["request"] for case in cases("sglang").values() if _is_one_generation(case)]
    with Replay("sglang") as server:
        ranks = []
        for rank in range(2):
            samples = [Sample(rank * 100 + n, request) for n, request in enumerate(asked)]
            summary = asyncio.run(generate_rollout(server.url, samples, step=1, recorder=recorder))
            ranks.append(json.dumps(summary.as_dict()))
            print(f"rank {rank}: {summary.generations} generations, accept rate {summary.ratios['accept_rate']:.4f}")
    together = merged(ranks)
    print(f"together: {together.generations} generations, accept rate {together.ratios['accept_rate']:.4f}")
    print(f"covered: {together.coverage['accept_rate']:.0%} (a request of one token tells nothing about drafts)")
    (pooled,) = pool(reader.get_metrics_data())
    print(f"the counters say the same: {pooled.ratios['accept_rate']:.4f} of {pooled.generations} generations")


def _is_one_generation(case: Any) -> bool:
    return case["path"] == "/generate" and isinstance(case.get("response"), dict)


if __name__ == "__main__":
    main()
