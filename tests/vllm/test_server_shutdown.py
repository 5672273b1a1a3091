"""How a real server ends, and what is lost: after an idle second nothing, under load what no export had yet.

The export interval is 60 s, so what arrives does so by our flush of an idle engine, or by a process that ends in an
orderly way. docs/reliability.md has the table.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.vllm_demo.server import VllmServer
from examples.vllm_demo.tiny_model import Models
from examples.vllm_demo.traffic import Answer, complete, send_now
from tests.vllm.serving import KNOWN, MODEL, Serving, check_attributes, processes_of, serving, short, wait_for


def main_process(server: VllmServer) -> list[int]:
    assert server.pid is not None
    return [server.pid]


def engine_core(server: VllmServer) -> list[int]:
    found = [pid for pid in processes_of(server) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1, found
    return found


@dataclass(frozen=True)
class End:
    """A signal, who gets it, the server's arguments, and whether what is running may be lost."""

    number: signal.Signals
    to: Callable[[VllmServer], list[int]]
    arguments: Sequence[str] = ()
    loses: bool = True


ENDS = {
    "SIGTERM, as vLLM has it": End(signal.SIGTERM, main_process),
    "SIGTERM with a timeout": End(signal.SIGTERM, main_process, ("--shutdown-timeout", "60"), loses=False),
    "SIGKILL of the engine": End(signal.SIGKILL, engine_core),
    "Ctrl-C": End(signal.SIGINT, processes_of),  # a terminal sends it to every process of the group
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_end_under_load_loses_at_most_what_ran_since_the_last_idle_moment(
    models: Models, tmp_path: Path, end: End
) -> None:
    with serving(models, tmp_path, extra_args=end.arguments) as served:
        served.ask(short(20, 7))
        idle = served.settle(20, seconds=5)
        assert idle["completion"] == 20 * 7
        answers, clients = under_load(served)
        for pid in end.to(served.server):
            os.kill(pid, end.number)
        assert wait_for(lambda: not served.server.running, 90)
        clients.join(60)
        assert not clients.is_alive()
        totals = served.totals()
        check_attributes(served, {0})  # no stream of another process, and none twice
        got = sum(answer.tokens for answer in answers)
        lost = idle["completion"] + got - totals["completion"]
        print(
            f"clients got {got} tokens of {len(answers)} requests after the last idle moment, {max(lost, 0)} are lost"
        )
        assert totals["completion"] >= idle["completion"]
        assert totals["generations"] >= idle["generations"]
        if not end.loses:
            assert all(answer.error is None for answer in answers)
            assert lost == 0
            assert totals["generations"] == 20 + len(answers)


def under_load(served: Serving) -> tuple[list[Answer], threading.Thread]:
    """Eight clients that each wait for a thousand tokens, once all of them have some."""
    answers: list[Answer] = []
    ask = complete("long", KNOWN, 1_000, stream=True)

    def traffic() -> None:
        answers.extend(send_now(served.server.url, MODEL, [ask] * 8, at_once=8))

    before = served.vllm()["completion"]
    clients = threading.Thread(target=traffic)
    clients.start()
    assert wait_for(lambda: served.vllm()["completion"] > before + 100, 30)
    return answers, clients
