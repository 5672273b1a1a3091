"""What a rollout's batch costs: `SpecDecRecorder.record_batch` beside the mean over samples that frameworks take today.

    python -m tests.benchmarks.record_batch [--reports 100000] [--rounds 9]

The same generations, as reports and as the `SpecInfo` objects of slime and miles: that mean is a division for each
sample and knows neither duplicates nor coverage. Beside them, what it takes to read the counters from a response in the
first place. The variants take turns, round after round; the figures are medians of this process's CPU time, the spread
is the quartiles. Memory is that of `tracemalloc`: the highest point above the reports themselves, and what the recorder
keeps afterwards; ids are as vLLM makes them, 41 characters. Needs the environment `dev`; it is not a test, and no test
looks at a clock.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder, reports_from_payload


@dataclass
class SpecInfo:
    """What slime keeps of a sample (slime/utils/types.py), with 0.0 where nothing is known."""

    accepted: int = 0
    proposed: int = 0
    verify: int = 0
    completion: int = 0

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.proposed if self.proposed > 0 else 0.0

    @property
    def accept_length(self) -> float:
        return self.completion / self.verify if self.verify > 0 else 0.0


def per_sample_means(samples: list[SpecInfo]) -> dict[str, float]:
    """The metric of slime, miles and vime, as they compute it."""
    return {
        "spec_accept_rate": sum(sample.accept_rate for sample in samples) / len(samples),
        "spec_accept_length": sum(sample.accept_length for sample in samples) / len(samples),
    }


def generations(number: int) -> list[SpecCounts]:
    draw = random.Random(0)
    made = []
    for _ in range(number):
        verify = draw.randrange(1, 800)
        accepted = sum(draw.randrange(5) for _ in range(4)) * verify // 4
        made.append(SpecCounts(min(accepted, 4 * verify), 4 * verify, verify, accepted + verify + 1, accepted + verify))
    return made


def ids(number: int) -> list[str]:
    draw = random.Random(1)
    return [f"chatcmpl-{draw.getrandbits(128):032x}" for _ in range(number)]


def payload(number: int, counts: SpecCounts) -> dict[str, Any]:
    return {
        "text": "x" * 200,
        "meta_info": {
            "id": f"{number:032x}", "finish_reason": {"type": "stop"}, "prompt_tokens": 100,
            "completion_tokens": counts.completion, "spec_verify_ct": counts.verify, "spec_accept_rate": 0.5,
            "spec_num_correct_drafts": counts.accepted, "spec_num_proposed_drafts": counts.proposed,
        },
    }  # fmt: skip


def recorder(remembered: int) -> SpecDecRecorder:
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    return SpecDecRecorder(provider, remembered=remembered)


def timed(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def one_by_one(one: SpecDecRecorder, reports: Iterable[GenerationReport]) -> None:
    for report in reports:
        one.record(report)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.record_batch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--reports", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    number = options.reports

    counts = generations(number)
    reports = [
        GenerationReport(id_, each, session_id=f"step {n // 512}", sample_id=str(n // 4), model="m", provider="sglang")
        for n, (id_, each) in enumerate(zip(ids(number), counts, strict=True))
    ]
    twice = reports[: number // 2] * 2
    running = [r for n, each in enumerate(reports[: number // 2]) for r in (halved(n, each), each)]
    infos = [SpecInfo(c.accepted or 0, c.proposed or 0, c.verify or 0, c.completion or 0) for c in counts]
    payloads = [payload(n, each) for n, each in enumerate(counts)]

    variants: dict[str, Callable[[], object]] = {
        "mean over samples (slime, miles, vime)": lambda: per_sample_means(infos),
        "record_batch": lambda: recorder(65_536).record_batch(reports),
        "record_batch, dedupe='batch'": lambda: recorder(65_536).record_batch(reports, dedupe="batch"),
        "record_batch, each generation twice": lambda: recorder(65_536).record_batch(twice),
        "record_batch, a running report each": lambda: recorder(65_536).record_batch(running),
        "record, one by one": lambda: one_by_one(recorder(65_536), reports),
        "reports_from_payload": lambda: [reports_from_payload(each) for each in payloads],
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, call in variants.items():
            times[name].append(timed(call))
    print(f"{number} reports, {options.rounds} rounds; median and quartiles")
    for name, taken in times.items():
        low, median, high = statistics.quantiles(taken, n=4)
        print(
            f"  {name:40} {median * 1e3:8.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})  "
            f"{median / number * 1e6:6.2f} µs a report, {number / median / 1e3:7.0f} thousand a second"
        )

    print("memory (tracemalloc)")
    for state in ("finished", "running"):
        for remembered in (1, 65_536, 2 * number):
            kept, highest = memory(remembered, reports, finished=state == "finished")
            entries = min(remembered, number)
            print(
                f"  remembered={remembered:7}, all {state}: {highest / 2**20:6.1f} MiB at the highest, "
                f"{kept / 2**20:6.1f} MiB kept, {kept / entries:6.0f} bytes for each of {entries}"
            )


def halved(number: int, report: GenerationReport) -> GenerationReport:
    half = SpecCounts(*(None if value is None else value // 2 for value in report.counts.as_dict().values()))
    return GenerationReport(report.generation_id, half, session_id=report.session_id, finished=False, model="m")


def memory(remembered: int, reports: list[GenerationReport], *, finished: bool) -> tuple[int, int]:
    """Bytes that a recorder keeps after a batch, and the most that the batch took; the reports are gone by then."""
    gc.collect()
    tracemalloc.start()
    one = recorder(remembered)
    before, _ = tracemalloc.get_traced_memory()
    own = [fresh(report, finished) for report in reports]
    with_reports, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    one.record_batch(own)
    _, highest = tracemalloc.get_traced_memory()
    del own
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept - before, highest - with_reports


def fresh(report: GenerationReport, finished: bool) -> GenerationReport:
    """A report whose id and numbers are its own, as those that come out of JSON."""
    id_ = report.generation_id[:1] + report.generation_id[1:]
    counts = [None if value is None else int(str(value)) for value in report.counts.as_dict().values()]
    return GenerationReport(id_, SpecCounts(*counts), session_id=report.session_id, finished=finished)


if __name__ == "__main__":
    main()
