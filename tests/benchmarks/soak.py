"""An hour at 1,000 generations a second through vLLM's real scheduler: memory, cost and totals, minute by minute.

    build/venvs/vllm/bin/python -m tests.benchmarks.soak run build/soak [--minutes 60] [--traced 5]
    build/venvs/downstream/bin/python -m tests.benchmarks.soak draw build/soak docs/images

The scheduler and our hooks are the real ones, from `add_request` to the finished output; the model is not: its tokens
are synthetic (up to 4 drafts a step, any of them accepted, 1 to 12 tokens a generation, one in a hundred aborted). It
goes as fast as it can; a minute is 60,000 generations, with one collection at its end, as an export every 60 s makes.
At each the counters must equal what this script has counted itself, running generations included, or it fails. Cost is
what the hooked methods take beyond the scheduler's own, which is timed inside them. The minutes of `--traced` come
after the others, and slowly: what `tracemalloc` finds allocated by the package and by the SDK.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import platform
import random
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

A_MINUTE = 60_000
RUNNING = 256
LONGEST = 12
FIELDS = ("accepted", "proposed", "verify", "completion", "emitted", "generations")


class Clock:
    """Nanoseconds of this thread's CPU inside vLLM's own methods, and around them: others may want the cores too."""

    def __init__(self) -> None:
        self.inside = self.around = 0

    def within(self, original: Any) -> Any:
        """`original`, with its time taken; it stands where vLLM's own method stood, so that our hook wraps it."""

        def timed(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self.inside += time.thread_time_ns() - start

        timed.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # the hooks look at it
        return timed


class Traffic:
    """Generations on a real scheduler, and what they really did."""

    def __init__(self, rig: Any, clock: Clock) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.rig, self.clock = rig, clock
        self.draw = random.Random(1)
        self.truth: Counter[str] = Counter(dict.fromkeys(FIELDS, 0))
        self._out: dict[str, int] = {}
        self._limit: dict[str, int] = {}
        self._number = 0
        self._request = Request
        self._params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(1, LONGEST + 1)]
        self._more = {"pooling_params": None, "arrival_time": 0.0}

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        scheduler, draw, clock, truth = self.rig.scheduler, self.draw, self.clock, self.truth
        while len(self._out) < RUNNING:
            self._number += 1
            name = f"cmpl-{self._number:032x}-0-abcdef12"
            limit = draw.randint(1, LONGEST)
            scheduler.add_request(
                self._request(
                    request_id=name, prompt_token_ids=[5] * 8, sampling_params=self._params[limit - 1], **self._more
                )
            )
            self._out[name], self._limit[name] = 0, limit
        step = scheduler.schedule()
        drafts = step.scheduled_spec_decode_tokens
        ids = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in ids:
            proposed = len(drafts.get(name, ()))
            generated = draw.randint(0, proposed) + 1
            sampled.append([7] * generated)
            emitted = min(generated, self._limit[name] - self._out[name])
            if proposed:
                truth["accepted"] += generated - 1
                truth["proposed"] += proposed
                truth["verify"] += 1
                truth["emitted"] += emitted
            truth["completion"] += emitted
            self._out[name] += emitted
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: row for row, name in enumerate(ids)}, sampled_token_ids=sampled
        )
        start = time.thread_time_ns()
        scheduler.update_from_output(step, output)
        clock.around += time.thread_time_ns() - start
        for name in ids:
            if self._out[name] == self._limit[name]:
                self._end(name)
            elif draw.random() < 0.003:
                start = time.thread_time_ns()
                scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
                clock.around += time.thread_time_ns() - start
                self._end(name)
        for request in scheduler.running:
            request.spec_token_ids = [9] * draw.randint(0, 4)

    def _end(self, name: str) -> None:
        del self._out[name], self._limit[name]
        self.truth["generations"] += 1


OURS = [tracemalloc.Filter(True, f"*{os.sep}{name}{os.sep}*") for name in ("otel_specdec", "opentelemetry")]


def our_bytes() -> int:
    return sum(each.size for each in tracemalloc.take_snapshot().filter_traces(OURS).statistics("filename"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def minutes(number: int, traffic: Traffic, reader: Any, *, traced: bool) -> list[dict[str, float]]:
    """So many times 60,000 generations and a collection; exits where the counters are not what was done."""
    from tests.unit.collected import points, totals

    rows: list[dict[str, float]] = []
    clock, truth = traffic.clock, traffic.truth
    started = time.monotonic()
    if traced:
        tracemalloc.start()
    while len(rows) < number:
        before = truth["generations"]
        clock.inside = clock.around = 0
        while truth["generations"] < before + A_MINUTE:
            traffic.step()
        start = time.perf_counter()
        found = points(reader.get_metrics_data())
        collected_s = time.perf_counter() - start
        if totals(found) != dict(truth):
            sys.exit(f"minute {len(rows) + 1}: {totals(found)} were counted of {dict(truth)}")
        generations = truth["generations"] - before
        gc.collect()
        row = {
            "generations": truth["generations"],
            "hook_us": (clock.around - clock.inside) / generations / 1e3,
            "scheduler_us": clock.inside / generations / 1e3,
            "collection_ms": collected_s * 1e3,
            "series": len(found),
            "resident_bytes": resident_bytes(),
        }
        if traced:
            row["our_bytes"] = our_bytes()
        rows.append(row)
        memory = f"{row['our_bytes'] / 1024:.1f} KiB ours" if traced else f"{row['resident_bytes'] / 2**20:.1f} MiB"
        print(
            f"minute {len(rows):2}, {time.monotonic() - started:5.0f} s: {row['generations']:9,.0f} generations, "
            f"{row['hook_us']:.2f} µs of ours beside {row['scheduler_us']:.1f} µs of vLLM's for each, {memory}",
            flush=True,
        )
    tracemalloc.stop()
    return rows


def run(folder: Path, untraced: int, traced: int) -> None:
    import vllm
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from vllm.v1.core.sched.scheduler import Scheduler

    from examples.vllm_demo.tiny_model import ensure_models
    from otel_specdec import GenerationExemplarFilter, views
    from tests.vllm.scheduler import Rig

    clock = Clock()
    for name in ("update_from_output", "finish_requests"):
        setattr(Scheduler, name, clock.within(vars(Scheduler)[name]))
    models = ensure_models(Path(__file__).resolve().parents[2] / "build" / "models")
    started = time.monotonic()
    done: dict[str, Any] = {}
    for part, number in (("minutes", untraced), ("traced", traced)):
        reader = InMemoryMetricReader()
        provider = MeterProvider(
            [reader], views=views(), exemplar_filter=GenerationExemplarFilter(), shutdown_on_exit=False
        )
        with Rig(models, provider=provider, max_num_seqs=RUNNING) as rig:
            traffic = Traffic(rig, clock)
            done[part] = minutes(number, traffic, reader, traced=part == "traced")
        print(f"exact at each of {number} collections: {dict(traffic.truth)}", flush=True)
        done.setdefault("totals", dict(traffic.truth))
    about = {
        "vllm": vllm.__version__, "python": platform.python_version(), "cpus": os.cpu_count(), "running": RUNNING,
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_text(json.dumps({"about": about, **done}, indent=1) + "\n")


def draw(folder: Path, images: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data: dict[str, Any] = json.loads((folder / "soak.json").read_text())
    rows, traced = data["minutes"], data["traced"]
    at = list(range(1, len(rows) + 1))
    figure, (memory, ours, cost) = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    memory.plot(at, [row["resident_bytes"] / 2**20 for row in rows], color="C0")
    memory.set(
        ylim=(0, 1.25 * max(row["resident_bytes"] for row in rows) / 2**20),
        xlabel="simulated minutes",
        ylabel="MiB",
        title="the process, resident",
    )
    ours.plot(range(1, len(traced) + 1), [row["our_bytes"] / 1024 for row in traced], color="C0", marker="o")
    ours.set(
        ylim=(0, 1.25 * max(row["our_bytes"] for row in traced) / 1024),
        xlabel="simulated minutes",
        ylabel="KiB",
        title="ours and the SDK's (tracemalloc)",
    )
    cost.plot(at, [row["scheduler_us"] for row in rows], color="0.5", label="vLLM's update_from_output")
    cost.plot(at, [row["hook_us"] for row in rows], color="C0", label="our hooks")
    cost.set(ylim=(0, None), xlabel="simulated minutes", ylabel="µs", title="CPU time for each generation")
    cost.legend(fontsize=8)
    figure.suptitle(
        f"{data['totals']['generations'] / 1e6:.1f} million generations through the real scheduler of vLLM "
        f"{data['about']['vllm']}: every total exact at each of {len(rows)} collections",
        fontsize=10,
    )
    images.mkdir(parents=True, exist_ok=True)
    figure.savefig(images / "soak.png", dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--minutes", type=int, default=60)
    running.add_argument("--traced", type=int, default=5)
    drawing = commands.add_parser("draw")
    drawing.add_argument("folder", type=Path)
    drawing.add_argument("images", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.folder, options.minutes, options.traced)
    else:
        draw(options.folder, options.images)


if __name__ == "__main__":
    main()
