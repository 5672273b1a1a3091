"""What a running generation costs in memory: vLLM's adapter and SGLang's, with and without being a candidate.

    python -m tests.benchmarks.in_flight [--generations 20000]

Stand-ins go through the adapters' own code; `tracemalloc` says what is kept while they all run, less what is kept
before. The 64 places for exemplars are full in both. Needs the environment `dev`; it is not a test.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

from otel_specdec.candidates import PICKS, PLACES
from otel_specdec.engines import vllm
from otel_specdec.engines.sglang import Knowledge, RankTally


def kept(act: Any) -> int:
    """Bytes that are there after `act` and were not before."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    act()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


class Request:
    """The attributes that the adapter reads."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_output_tokens = 0


def of_vllm(generations: int) -> tuple[float, float]:
    """Bytes of each of so many running generations, and of each candidate."""
    requests = {
        f"cmpl-{number:032x}-0-abcdef12": Request(f"cmpl-{number:032x}-0-abcdef12") for number in range(generations)
    }
    scheduler: Any = type("Scheduler", (), {})()
    scheduler.requests, scheduler.running, scheduler.finished_req_ids = requests, list(requests), set()
    listener = SimpleNamespace(engine_idle=lambda: None)
    places = PLACES + PICKS

    def begin(tally: vllm.StepTally, ids: list[str]) -> None:
        new = [SimpleNamespace(req_id=request_id) for request_id in ids]
        for drafts in (0, *[4] * 30):  # most of what waits to be counted together
            rows = {request_id: row for row, request_id in enumerate(ids)}
            step = SimpleNamespace(
                scheduled_new_reqs=[] if drafts else new,
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
                scheduled_spec_decode_tokens={request_id: [-1] * drafts for request_id in ids} if drafts else {},
            )
            output = SimpleNamespace(req_id_to_index=rows, sampled_token_ids=[[1] * (1 + drafts // 2) for _ in ids])
            outputs = [SimpleNamespace(request_id=i, new_token_ids=[1], finish_reason=None) for i in ids]
            before = tally.before_step(scheduler, step, output)
            tally.after_step(scheduler, step, output, before, {0: SimpleNamespace(outputs=outputs)})

    def run(number: int) -> int:
        tally = vllm.StepTally(SimpleNamespace(listener=listener), scheduler, counts=True)  # type: ignore[arg-type]
        bytes_kept = kept(lambda: begin(tally, list(requests)[:number]))
        tally.take()
        return bytes_kept

    run(1)
    few, many = run(places), run(generations)
    return (many - few) / (generations - places), few / places


def of_sglang(generations: int) -> tuple[float, float]:
    """The same for SGLang: of what is streamed, the newest row of each generation has to be kept."""
    knowledge = Knowledge(
        accepted="spec_num_correct_drafts", histogram=None, retractions=True, chain=0, emits_always=True, restores=False
    )
    state = SimpleNamespace(
        finished=False, obj=SimpleNamespace(session_id=None, sampling_params={}, input_embeds=None), time_stats=None
    )
    places = PLACES + PICKS

    def run(number: int) -> int:
        ids = [f"{n:032x}" for n in range(number)]
        states = dict.fromkeys(ids, state)
        watch: Any = SimpleNamespace(knowledge=knowledge, states=states, ended=False, closed=False)
        tally = RankTally(watch)

        def begin() -> None:
            # Messages of the same generations: the last one's columns are kept as they are.
            for tokens in (1000, 2000, 3000):
                columns = [[tokens + n % 7 for n in range(number)] for _ in knowledge.fields]
                message = SimpleNamespace(finished_reasons=[None] * number)
                if not tally.steady(ids, message, lambda _: columns):  # noqa: B023
                    tally.message(ids, columns, message.finished_reasons, 0)
                if tokens == 1000:
                    tally.take()  # what was added of each until then has to be known from now on

        return kept(begin)

    run(1)
    few, many = run(places), run(generations)
    return (many - few) / (generations - places), few / places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=20_000)
    arguments = parser.parse_args()
    for name, measured in (("vLLM", of_vllm), ("SGLang", of_sglang)):
        each, candidate = measured(arguments.generations)
        print(f"{name:8} {each:7.1f} bytes a running generation, {candidate:7.0f} bytes a candidate for exemplars")


if __name__ == "__main__":
    main()
