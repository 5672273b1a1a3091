"""Engines in processes of their own, however these begin and end: what arrives downstream, once, and what cannot.

Each script is a program in a file, since `spawn` and `forkserver` import it again. Every export is a line of a log that
all its processes share: what a backend would have, stream by stream.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource

from otel_specdec.sums import pool_for
from tests.unit.collected import Meter
from tests.unit.engine_stand_in import HandTally
from tests.unit.scripts import Ended, run
from tests.unit.test_sums import engine_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PROGRAM = '''
import concurrent.futures.thread, json, logging, multiprocessing, os, signal, sys, threading, time
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from otel_specdec.instrumentors import EngineCounters
from tests.unit.collected import points
from tests.unit.engine_stand_in import HandTally, description

LOG, METHOD, INSTANCE = sys.argv[1:]

class Exporter(MetricExporter):
    """Appends every point to the log: who, which stream, its value."""
    def export(self, data, timeout_millis=10_000, **kwargs):
        lines = [
            json.dumps([os.getpid(), point.name, sorted(point.attributes.items()), point.value])
            for point in points(data)
        ]
        with open(LOG, "a") as log:
            log.write("".join(line + "\\n" for line in lines))
        return MetricExportResult.SUCCESS
    def force_flush(self, timeout_millis=10_000):
        return True
    def shutdown(self, timeout_millis=30_000, **kwargs):
        pass

def make_provider(exporter=None):
    resource = Resource({"service.instance.id": INSTANCE} if INSTANCE else {})
    return MeterProvider([PeriodicExportingMetricReader(exporter or Exporter())], resource)

def serve(provider, index=0, ours=True):
    """An engine, whose provider we may flush where it is `ours`."""
    tally = HandTally()
    counters = EngineCounters(provider, logging.getLogger("test"))
    if ours:
        counters._provider = lambda: (provider, "ours", True)
    counters.engine_started(description(index=index), tally, lambda: True)
    return counters, tally

def await_flush(value):
    """Wait until the log has this value of accepted tokens, as an idle second does."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if os.path.exists(LOG) and any(
            json.loads(line)[1::2] == ["specdec.accepted_tokens", value] for line in open(LOG)
        ):
            return
        time.sleep(0.02)
    raise SystemExit("nothing was flushed")
'''

METHODS = ["spawn", "fork", "forkserver"]
INSTANCES = ["", "pod-7"]


def start(folder: Path, script: str, method: str, instance: str = "") -> Ended:
    program = folder / "program.py"
    program.write_text(PROGRAM + script)
    arguments = [str(program), str(folder / "log"), method, instance]
    return run(f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path(sys.argv[0], run_name='__main__')")


def exports(folder: Path) -> list[list[Any]]:
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def downstream(lines: list[list[Any]], name: str = "specdec.accepted_tokens") -> int:
    """The sum over streams of each one's last value; a stream is told apart by its labels alone, as in one pod."""
    writers: dict[str, set[int]] = {}
    for pid, metric, labels, _ in lines:
        writers.setdefault(f"{metric} {labels}", set()).add(pid)
    assert all(len(pids) == 1 for pids in writers.values()), "two processes write one stream"
    last = {json.dumps(labels): value for _, metric, labels, value in lines if metric == name}
    return sum(last.values())


ENDS = """
def child(how):
    counters, tally = serve(provider if METHOD == "fork" else make_provider(), index=1)
    tally.put(7)
    counters.engine_idle()
    await_flush(7)
    tally.put(50)  # after the last flush
    if how == "os._exit":
        os._exit(3)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise SystemExit(3)

if __name__ == "__main__":
    provider = make_provider()
    counters, tally = serve(provider)
    tally.put(1000)
    provider.force_flush()  # a forked child inherits what the SDK has summed up
    process = multiprocessing.get_context(METHOD).Process(target=child, args=(HOW,))
    process.start()
    process.join(40)
    print(json.dumps(process.exitcode))
elif METHOD != "fork":
    provider = None
"""


@pytest.mark.parametrize("instance", INSTANCES, ids=["no instance id", "one instance id"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("how", "status", "kept"),
    [("return", 0, 57), ("exception", 3, 57), ("os._exit", 3, 7), ("SIGKILL", -signal.SIGKILL, 7)],
)
def test_a_child_s_engine_loses_at_most_what_came_after_its_last_flush_and_doubles_nothing(
    tmp_path: Path, method: str, how: str, status: int, kept: int, instance: str
) -> None:
    ended = start(tmp_path, f"HOW = {how!r}\n" + ENDS, method, instance)
    assert ended.value == status
    assert downstream(exports(tmp_path)) == 1000 + kept


FORKED_WHILE_EXPORTING = '''
class Stuck(Exporter):
    """Its first export begins and does not end until it is told."""
    begun, released = threading.Event(), threading.Event()
    def export(self, data, **kwargs):
        if not self.begun.is_set():
            self.begun.set()
            self.released.wait(30)
        return super().export(data, **kwargs)

def child():
    counters, tally = serve(provider, index=1)
    tally.put(7)

if __name__ == "__main__":
    provider = make_provider(Stuck())
    counters, tally = serve(provider, ours=False)
    tally.put(1000)
    flush = threading.Thread(target=provider.force_flush)
    flush.start()
    assert Stuck.begun.wait(20)
    started = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(40)
    took = time.monotonic() - started
    Stuck.released.set()
    flush.join(20)
    tally.put(5)
    provider.force_flush()
    print(json.dumps([process.exitcode, took < 20]))
'''


def test_a_fork_in_the_middle_of_an_export_stops_neither_and_doubles_nothing(tmp_path: Path) -> None:
    """The child inherits locks of the SDK's that nobody would give back there; it takes new ones."""
    ended = start(tmp_path, FORKED_WHILE_EXPORTING, "fork")
    assert ended.value == [0, True]
    assert downstream(exports(tmp_path)) == 1005 + 7


# Streams: no two processes share one


def streams(resource: dict[str, str], *engines: tuple[str, int]) -> list[set[Any]]:
    """For each engine of its own process, by role and index: what tells its streams apart downstream."""
    found = []
    for role, index in engines:
        meter = Meter(resource=resource)
        engine_of(meter.provider, HandTally(), role=role, index=index)
        found.append({(point.series, tuple(resource.items())) for point in meter.points()})
    return found


POD = {"service.instance.id": "pod-7"}
ONE_SERVER = [
    [("", 0), ("", 1)],  # two data-parallel engines of vLLM
    [("", 0), ("api-0", 0), ("api-1", 0)],  # an engine and its API servers
    [("tokenizer-1", 0), ("tokenizer-2", 0)],  # SGLang's tokenizer workers
]


@pytest.mark.parametrize("resource", [POD, {}], ids=["one instance id", "no instance id"])
@pytest.mark.parametrize("engines", ONE_SERVER)
def test_processes_of_one_server_in_one_pod_share_no_stream(
    resource: dict[str, str], engines: list[tuple[str, int]]
) -> None:
    found = streams(resource, *engines)
    assert len(set.union(*found)) == sum(map(len, found))


def test_two_servers_in_one_pod_share_their_streams_unless_each_has_an_instance_id_of_its_own() -> None:
    """What docs/reliability.md warns of: a backend takes the two for one counter that jumps back and forth."""
    one, other = streams(POD, ("", 0), ("", 0))
    assert one == other
    (named,) = streams({"service.instance.id": "pod-7/b"}, ("", 0))
    assert one.isdisjoint(named)
    one, other = streams({}, ("", 0), ("", 0))
    assert one.isdisjoint(other)


def test_the_user_s_resource_stays_as_it_is() -> None:
    resource = Resource({"service.instance.id": "mine", "service.name": "s", "k8s.pod.name": "p"})
    provider = MeterProvider(resource=resource, shutdown_on_exit=False)
    engine_of(provider, HandTally())
    assert pool_for(provider).process("engine-0") == "engine-0"
    assert provider._sdk_config.resource is resource
    assert dict(resource.attributes) == {"service.instance.id": "mine", "service.name": "s", "k8s.pod.name": "p"}
