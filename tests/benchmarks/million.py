"""A million malformed steps of vLLM, messages of SGLang, and names: what CI does with some thousands of each.

    build/venvs/dev/bin/python -m tests.benchmarks.million [steps] [messages] [names] [--number 1000000] [--seed 7]

`steps` and `messages` hand random shapes to the hooked methods of the stand-ins (tests/unit/malformed.py): nothing of
ours may come out of them, and what is collected stays a sum. `names` records a million generations, each with an id, a
model and a method of its own: series and memory stay bounded, totals exact. Prints what it took; ends at the first
thing that is wrong. Random steps on vLLM's real scheduler, with every total exact, are those of soak.py.
"""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from tests.unit import sglang_stand_in, vllm_stand_in
from tests.unit.collected import Meter
from tests.unit.malformed import Abuse, SglangAbuse, VllmAbuse

COUNTS = SpecCounts(1, 2, 1, 3, 2)


def abused(abuse: Abuse, number: int) -> str:
    for n in range(number):
        abuse.once()
        if n % 10_000 == 0:
            abuse.check()
    abuse.check()
    assert abuse.works_still()
    errors = sum(abuse.meter.errors().values())
    return f"{errors:,} of them could not be read, {abuse.last['generations']:,} generations were counted all the same"


def steps(number: int, seed: int) -> str:
    folder = Path(tempfile.mkdtemp())
    vllm_stand_in.write(folder)
    with vllm_stand_in.importable(folder) as load:
        return abused(VllmAbuse(seed, load()), number)


def messages(number: int, seed: int) -> str:
    with sglang_stand_in.importable() as manager:
        return abused(SglangAbuse(seed, manager), number)


def names(number: int, seed: int) -> str:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for start in range(0, number, 10_000):
        recorder.record_batch(
            GenerationReport(f"id {n + seed}", COUNTS, session_id=f"session {n}", model=f"m{n}", method=f"d{n}")
            for n in range(start, start + 10_000)
        )
    assert meter.totals()["generations"] == number // 10_000 * 10_000
    return f"{len(meter.points()):,} series"


PARTS: dict[str, Callable[[int, int], str]] = {"steps": steps, "messages": messages, "names": names}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.million", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--number", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each kind of error is logged once
    for part in options.parts or PARTS:
        started = time.monotonic()
        said = PARTS[part](options.number, options.seed)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{part}: {options.number:,} in {time.monotonic() - started:.0f} s, {said}; {most:.0f} MiB at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
