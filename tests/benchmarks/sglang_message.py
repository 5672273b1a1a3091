"""What the hook costs SGLang: `TokenizerManager._handle_batch_output` with and without, pair by pair, in one process.

    python -m tests.benchmarks.sglang_message [--messages 3000] [--rows 1 32 256]

The real manager of the installed SGLang with messages that a scheduler would send, in three kinds of traffic: `running`
(every row of every message is a running generation: streaming), `lives` (generations of eight messages: begin, run,
finish), and `one message` (each generation is told by its last message alone: what is not streamed). Both variants
handle equal messages one after the other, in changing order and on either of two managers; the figures are medians, and
the spread is that of the medians of ten equal parts. A collection comes every 1,000 messages (some 20 s of a busy
engine; the SDK's default is 60 s). Needs the environment `sglang`; it is not a test, and no test looks at a clock.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import uuid
from collections.abc import Iterator
from typing import Any

from tests.sglang.manager import CHAIN, LENGTH, NGRAM, Rig, Says, message

KINDS = ("running", "lives", "one message")


def traffic(kind: str, rows: int) -> Iterator[tuple[list[str], list[Says]]]:
    """Messages without end: the ids of requests that begin with each, and its rows."""
    length = {"running": 1 << 30, "lives": 8, "one message": 1}[kind]
    ids = [uuid.uuid4().hex for _ in range(rows)]
    steps = [n % min(length, 8) for n in range(rows)]
    begin = list(ids)
    while True:
        said = []
        for n in range(rows):
            steps[n] += 1
            done = steps[n] >= length
            step = steps[n] if length > 1 else 10
            says = Says(ids[n], 1 + 3 * step, step, 2 * step, LENGTH if done else None, 0, [0, 0, step])
            said.append(says)
        yield begin, said
        begin = []
        for n in range(rows):
            if said[n].reason:
                ids[n], steps[n] = uuid.uuid4().hex, 0
                begin.append(ids[n])


def measure(
    kind: str, rows: int, messages: int, settings: dict[str, Any], *, stream: bool, swapped: bool
) -> tuple[list[float], list[float]]:
    """Seconds of each message, plain and hooked."""
    plain: list[float] = []
    hooked: list[float] = []
    with Rig(**settings) as rig:
        method = type(rig.manager)._handle_batch_output
        original = method.__wrapped__
        # Two managers of the same kind differ by some percent, by where their memory lies: each has either part in
        # turn.
        first, second = rig.manager, rig.new_manager()
        stamps = {"plain": plain, "hooked": hooked}
        managers = {"plain": second, "hooked": first} if not swapped else {"plain": first, "hooked": second}
        made = rig.manager = managers["hooked"]
        rig.says()  # it is met
        gc.collect()
        gc.disable()
        try:
            for number, (begin, said) in enumerate(traffic(kind, rows)):
                if number == messages:
                    break
                order = ("plain", "hooked") if number % 2 else ("hooked", "plain")
                for which in order:
                    rig.manager = managers[which]
                    for rid in begin:
                        rig.add(rid, stream=stream)
                    received = message(*said)
                    # As they come from the wire: no string's hash is known yet.
                    received.rids = ["".join(rid) for rid in map(list, received.rids)]
                    function = method if which == "hooked" else original
                    start = time.perf_counter()
                    coroutine = function(rig.manager, received)
                    try:
                        coroutine.send(None)
                        while True:
                            coroutine.send(None)
                    except StopIteration:
                        pass
                    stamps[which].append(time.perf_counter() - start)
                    for state in rig.manager.rid_to_state.values():
                        state.out_list.clear()
                rig.manager = made
                if number % 1000 == 500:
                    rig.counted()
                if number % 100 == 99:
                    gc.collect()
        finally:
            gc.enable()
            rig.manager = made
        assert rig.meter.errors() == {}
    return plain[200:], hooked[200:]


def spread(values: list[float]) -> float:
    size = len(values) // 10
    parts = [statistics.median(values[n * size : (n + 1) * size]) for n in range(10)]
    return (max(parts) - min(parts)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--chain", action="store_true", help="EAGLE with a fixed chain instead of NGRAM")
    asked = parser.parse_args()
    settings = CHAIN if asked.chain else NGRAM
    print(f"{'traffic':>12} {'rows':>5} {'plain µs':>10} {'hooked µs':>10} {'cost':>7}  spread of the cost")
    for kind in KINDS:
        for rows in asked.rows:
            halves = [
                measure(kind, rows, asked.messages // 2, settings, stream=kind != "one message", swapped=swapped)
                for swapped in (False, True)
            ]
            plain = [each for part in zip(halves[0][0], halves[1][0], strict=True) for each in part]
            hooked = [each for part in zip(halves[0][1], halves[1][1], strict=True) for each in part]
            pairs = [ours / theirs - 1 for theirs, ours in zip(plain, hooked, strict=True)]
            base, ours = statistics.median(plain), statistics.median(hooked)
            print(
                f"{kind:>12} {rows:>5} {base * 1e6:>10.1f} {ours * 1e6:>10.1f} {statistics.median(pairs):>+7.1%}"
                f"  ± {spread(pairs):.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
