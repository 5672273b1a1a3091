"""What the hook costs vLLM's scheduler: `Scheduler.update_from_output` with and without, pair by pair, in one process.

    python -m tests.benchmarks.vllm_step [--steps 1000] [--requests 1 16 128 256] [--without-naive]

The real scheduler of the installed vLLM with synthetic outputs (three tokens of five for each request and step). Beside
our hook stand what one would write first: five `Counter.add` for each generation and step, and one `Histogram.record`.
Every variant has a scheduler of its own, and they take turns, step after step, in changing order. What one costs is
the median of the differences to the plain step of the same round, and its spread that of the medians of ten equal
parts. Our hook counts steps 32 together: those that do so have a median of their own, which enters the figure by their
share. After 1,000 steps comes a collection (some 20 s of a busy engine; the SDK's default is 60 s): the candidates for
exemplars are chosen anew from the births after it, so that the first of these cost more.

A difference of two long steps is noisy on a shared machine. So what our hook's own calls take is also measured in
itself, as the time of the hooked call less that of vLLM's method within it: this leaves out what the hook may do to
vLLM's caches, and nothing else. The naive forms take up to 20 ms a step, and leave nothing of ours in the caches;
without them it is more like an engine whose model runs on another device. Three kinds of step:

- alike: every request has four drafts, as with a draft model;
- mixed: every other request has some drafts, of different number, as with n-grams;
- ending: in each step some requests finish, their last tokens trimmed, and as many new ones begin. A step in which
  anybody does costs more than one in which nobody does; what a generation costs besides its steps, its birth included,
  is what the step and the hook's own calls take more where more of them finish.

Needs the environment `vllm`; it is not a test, and no test looks at a clock.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.vllm_demo.tiny_model import ensure_models
from otel_specdec.engines import vllm
from otel_specdec.engines.vllm_shared import hook
from tests.vllm.scheduler import DRAFT, Rig

Update = Callable[[Any, Any, Any], Any]


FEW, MANY = 8, 32  # generations that finish in a step
VARIANTS = PLAIN, OURS, ADDS, RECORD = "plain", "otel_specdec", "5 Counter.add", "1 Histogram.record"


def naive_adds(plain: Update) -> Update:
    meter = MeterProvider([InMemoryMetricReader()]).get_meter("naive")
    counters = [meter.create_counter(f"c{n}") for n in range(5)]
    attributes: dict[str, str | int] = {"gen_ai.request.model": "m", "specdec.engine.index": 0}

    def update(scheduler: Any, step: Any, output: Any) -> Any:
        drafts, rows = step.scheduled_spec_decode_tokens, output.req_id_to_index
        before = {id_: (len(d), len(output.sampled_token_ids[rows[id_]])) for id_, d in drafts.items()}
        result = plain(scheduler, step, output)
        for outputs in result.values():
            for each in outputs.outputs:
                if each.request_id in before:
                    proposed, generated = before[each.request_id]
                    values = (generated - 1, proposed, 1, len(each.new_token_ids), len(each.new_token_ids))
                    for counter, value in zip(counters, values, strict=True):
                        counter.add(value, attributes)
        return result

    return update


def naive_histogram(plain: Update) -> Update:
    meter = MeterProvider([InMemoryMetricReader()]).get_meter("naive")
    histogram = meter.create_histogram("h")
    attributes: dict[str, str | int] = {"gen_ai.request.model": "m", "specdec.engine.index": 0}

    def update(scheduler: Any, step: Any, output: Any) -> Any:
        result = plain(scheduler, step, output)
        for outputs in result.values():
            for each in outputs.outputs:
                histogram.record(len(each.new_token_ids), attributes)
        return result

    return update


@dataclass(frozen=True)
class Shape:
    """What the steps look like."""

    requests: int
    mixed: bool = False
    ending: int = 0  # requests that finish in each step

    def __str__(self) -> str:
        kind = "mixed" if self.mixed else f"{self.ending} ending" if self.ending else "alike"
        return f"{self.requests} running requests, {kind}"


def next_step(rig: Rig, shape: Shape, ids: Iterator[str]) -> tuple[Any, Any]:
    """What the rig's scheduler schedules next, and what the model makes of it."""
    from vllm.v1.outputs import ModelRunnerOutput

    for request_id in itertools.islice(ids, shape.requests - len(rig.scheduler.running)):
        rig.add(request_id, max_tokens=1_000_000, prompt=8)
    for row, request in enumerate(rig.scheduler.running):
        request.spec_token_ids = DRAFT[: (row // 2) % 4 + 1 if row % 2 else 0] if shape.mixed else list(DRAFT)
        # Keep the requests short, or the scheduler's own cost grows with every step.
        if request.num_output_tokens > 60:
            del request._output_token_ids[1:]
            del request._all_token_ids[9:]
            request.num_computed_tokens = 8
    for request in rig.scheduler.running[: shape.ending]:
        request.max_tokens = request.num_output_tokens + 2
    step = rig.schedule()
    scheduled = list(step.num_scheduled_tokens)
    drafts = step.scheduled_spec_decode_tokens
    output = ModelRunnerOutput(
        req_ids=scheduled,
        req_id_to_index={request_id: row for row, request_id in enumerate(scheduled)},
        sampled_token_ids=[[10, 11, 12][: 1 + len(drafts.get(request_id, ()))] for request_id in scheduled],
    )
    return step, output


@dataclass(frozen=True)
class Round:
    """Microseconds of one step of each variant, and of our hook's own calls; whether it counted the others too."""

    times: dict[str, float]
    own: float
    counting: bool

    def above(self, name: str) -> float:
        return self.times[name] - self.times[PLAIN]


def measure(rig: Rig, shape: Shape, steps: int, names: Sequence[str]) -> list[Round]:
    """So many rounds of these variants."""
    from vllm.v1.core.sched.scheduler import Scheduler

    hooked: Update = vars(Scheduler)["update_from_output"]
    plain: Update = hooked.__wrapped__  # type: ignore[attr-defined]
    inner = 0.0

    def timed(*args: Any) -> Any:
        nonlocal inner
        start = time.perf_counter()
        result = plain(*args)
        inner = time.perf_counter() - start
        return result

    ours = hook(timed, vllm._around_update)
    variants: dict[str, Update] = {
        PLAIN: plain,
        OURS: ours,
        ADDS: naive_adds(plain),
        RECORD: naive_histogram(plain),
    }
    variants = {name: variants[name] for name in names}
    ids = (f"cmpl-{number:032x}-0-abcdef12" for number in itertools.count())
    schedulers = {}
    for name in variants:
        rig.scheduler = schedulers[name] = rig.new_scheduler()
        for request_id in itertools.islice(ids, shape.requests):
            rig.add(request_id, max_tokens=1_000_000, prompt=8)
        rig.step({request_id: [10] for request_id in rig.scheduler.requests})
    tally: Any = vllm.Hooks._installed.tally_for(schedulers[OURS])  # type: ignore[union-attr]
    rounds: list[Round] = []
    order = list(variants)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(steps):
            times = {}
            waiting = len(tally._line)
            for name in order:
                rig.scheduler = schedulers[name]
                step, output = next_step(rig, shape, ids)
                start = time.perf_counter()
                variants[name](rig.scheduler, step, output)
                times[name] = (time.perf_counter() - start) * 1e6
            rounds.append(Round(times, times[OURS] - inner * 1e6, len(tally._line) < waiting))
            order.append(order.pop(0))
            if number % 1000 == 999:
                rig.reader.get_metrics_data()
    finally:
        gc.enable()
        gc.unfreeze()
    return rounds


def above(rounds: Sequence[Round], name: str) -> float:
    """Microseconds above the plain step."""
    if name == OURS:
        return by_kind(rounds, lambda each: each.above(name))
    return statistics.median(each.above(name) for each in rounds)


def own(rounds: Sequence[Round]) -> float:
    """Microseconds of our hook's own calls."""
    return by_kind(rounds, lambda each: each.own)


def by_kind(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    """The medians of the steps that only stand in the line and of those that count it, by their shares."""
    kinds = [[value(each) for each in rounds if each.counting is counting] for counting in (False, True)]
    return sum(statistics.median(kind) * len(kind) for kind in kinds if kind) / len(rounds)


def plain_time(rounds: Sequence[Round]) -> float:
    """Microseconds of the plain step."""
    return statistics.median(each.times[PLAIN] for each in rounds)


def tenths(rounds: Sequence[Round]) -> list[Sequence[Round]]:
    size = len(rounds) // 10
    return [rounds[n * size : (n + 1) * size] for n in range(10)]


def row(name: str, rounds: Sequence[Round], more: Callable[[Sequence[Round]], float]) -> str:
    """What it takes above the plain step: in µs, in percent, and the smallest and largest percentage of ten parts."""
    parts = [100 * more(part) / plain_time(part) for part in tenths(rounds)]
    spread = f"{min(parts):+.1f} … {max(parts):+.1f} %"
    return f"  {name:24} {more(rounds):+9.1f} µs  {100 * more(rounds) / plain_time(rounds):+7.1f} %   {spread}"


def of_one_more(few: Sequence[Round], many: Sequence[Round], more: Callable[[Sequence[Round]], float]) -> float:
    """Microseconds that one more generation costs which finishes in a step, where another begins for it."""
    return (more(many) - more(few)) / (MANY - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 128, 256])
    parser.add_argument("--without-naive", action="store_true")
    arguments = parser.parse_args()
    names = VARIANTS[:2] if arguments.without_naive else VARIANTS
    models = ensure_models(Path(__file__).resolve().parents[2] / "build" / "models")
    with Rig(models, max_num_seqs=512) as rig:
        for requests in arguments.requests:
            shapes = [Shape(requests), Shape(requests, mixed=True)]
            if requests >= 8 * FEW:
                shapes += [Shape(requests, ending=FEW), Shape(requests, ending=MANY)]
            by_ending: dict[int, list[Round]] = {}
            for shape in shapes:
                by_ending[shape.ending] = rounds = measure(rig, shape, arguments.steps, names)
                print(f"{shape}, {arguments.steps} steps of each")
                print(f"  {PLAIN:24} {plain_time(rounds):9.1f} µs")
                for name in names[1:]:
                    print(row(name, rounds, partial(above, name=name)), flush=True)
                print(row("otel_specdec's own calls", rounds, own), flush=True)
            if MANY in by_ending:
                few, many = by_ending[FEW], by_ending[MANY]
                print(f"{requests} running requests, a finished generation")
                for name, more in ((OURS, partial(above, name=OURS)), ("otel_specdec's own calls", own)):
                    value = of_one_more(few, many, more)
                    parts = [of_one_more(*pair, more) for pair in zip(tenths(few), tenths(many), strict=True)]
                    print(f"  {name:24} {value:+9.2f} µs   {min(parts):+.2f} … {max(parts):+.2f}", flush=True)


if __name__ == "__main__":
    main()
