"""A forked child exports only what it did itself, and hangs on no lock that the parent's threads held."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.unit.scripts import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PRELUDE = """
# Before any provider: where it is imported later, the SDK 1.45 hangs in its own fork handler (it starts a thread pool
# while concurrent.futures holds its lock around the fork).
import concurrent.futures.thread
import json, logging, os, signal, threading
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from otel_specdec.instrumentors import EngineCounters
from otel_specdec.sums import pool_for
from tests.unit.collected import in_memory_reader, points, totals
from tests.unit.engine_stand_in import HandTally, description

def make_provider(instance=None, delta=False):
    reader = in_memory_reader(delta=delta)
    resource = Resource({"service.instance.id": instance} if instance else {})
    return MeterProvider([reader], resource, shutdown_on_exit=False), reader

def report(recorder, generation, accepted, finished=True):
    recorder.record(GenerationReport(generation, SpecCounts(accepted), finished=finished))

def start_engine(provider, tally, **fields):
    EngineCounters(provider, logging.getLogger("test")).engine_started(description(**fields), tally, lambda: True)

def accepted(reader):
    return totals(points(reader.get_metrics_data())).get("accepted")

def processes(reader):
    return sorted({point.attributes["specdec.process"] for point in points(reader.get_metrics_data())})

def in_child(work):
    # What `work` returns in a forked child, which ends at once, and by force where it hangs.
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writable, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    killer = threading.Timer(20, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with os.fdopen(readable) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    killer.cancel()
    assert status == 0, f"the child ended with status {status}"
    return json.loads(text)

provider, reader = make_provider()
"""


def value(script: str) -> Any:
    return run(PRELUDE + script).value


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("collected", [False, True])
def test_a_child_exports_only_its_own_counts_and_the_parent_is_not_affected(delta: bool, collected: bool) -> None:
    child, parent = value(f"""
provider, reader = make_provider(delta={delta})
recorder, tally = SpecDecRecorder(provider), HandTally()
start_engine(provider, tally)
report(recorder, "before", 1000)
tally.put(5000)
if {collected}:
    reader.get_metrics_data()
def work():
    report(recorder, "in the child", 7)
    return [accepted(reader), accepted(reader)]
child = in_child(work)
report(recorder, "after", 10)
tally.put(50)
print(json.dumps([child, accepted(reader)]))
""")
    assert child[0] == 7
    assert parent == (60 if delta and collected else 6060)
    if not delta:
        assert child[1] == 7


def test_a_child_that_does_nothing_exports_nothing() -> None:
    exported = value("""
recorder = SpecDecRecorder(provider)
report(recorder, "before", 1000)
print(json.dumps(in_child(lambda: len(points(reader.get_metrics_data())))))
""")
    assert exported == 0


def test_a_generation_that_runs_on_in_the_child_adds_only_its_difference_there() -> None:
    child, parent = value("""
recorder = SpecDecRecorder(provider)
report(recorder, "g", 10, finished=False)
def work():
    report(recorder, "g", 12)
    return accepted(reader)
print(json.dumps([in_child(work), accepted(reader)]))
""")
    assert (child, parent) == (2, 10)


def test_a_child_has_a_process_of_its_own_where_there_is_no_instance_id() -> None:
    parent, child = value("""
def use():
    start_engine(provider, HandTally())
    report(SpecDecRecorder(provider), "g", 1)
    return processes(reader)
print(json.dumps([use(), in_child(use)]))
""")
    assert [name.rsplit("-", 1)[0] for name in parent] == [name.rsplit("-", 1)[0] for name in child]
    assert not set(parent) & set(child)


def test_a_child_s_engine_keeps_its_role_where_there_is_an_instance_id() -> None:
    parent, child = value("""
provider, reader = make_provider("pod-7")
def use():
    start_engine(provider, HandTally(), index=1)
    report(SpecDecRecorder(provider), "g", 1)
    return processes(reader)
print(json.dumps([use(), in_child(use)]))
""")
    assert parent[0] == child[0] == "engine-1"
    assert parent[1] != child[1]


def test_an_engine_of_the_child_is_counted_there_and_begins_at_zero() -> None:
    born, accepted = value("""
start_engine(provider, HandTally())
def work():
    tally = HandTally()
    start_engine(provider, tally)
    born = {point.value for point in points(reader.get_metrics_data())}
    tally.put(3, 4, 1, 4, 4)
    return [list(born), accepted(reader)]
print(json.dumps(in_child(work)))
""")
    assert (born, accepted) == ([0], 3)


@pytest.mark.parametrize(
    "lock",
    ["recorder._lock", "recorder._sums._lock", "pool_for(provider)._lock", "pool_for(provider)._draining"],
)
def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_the_parent_held(lock: str) -> None:
    accepted = value(f"""
recorder = SpecDecRecorder(provider)
held, done = threading.Event(), threading.Event()
def hold():
    with {lock}:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
def work():
    report(recorder, "g", 7)
    pool_for(make_provider()[0])
    return accepted(reader)
child = in_child(work)
done.set()
thread.join(30)
print(json.dumps(child))
""")
    assert accepted == 7


def test_a_fork_while_a_source_is_read_hangs_neither() -> None:
    child, parent = value("""
reading, done = threading.Event(), threading.Event()
class Slow(HandTally):
    def take(self):
        reading.set()
        done.wait(30)
        return super().take()
tally = Slow()
start_engine(provider, tally)
tally.put(5)
collector = threading.Thread(target=reader.get_metrics_data)
collector.start()
reading.wait(30)
def work():
    # Another provider: the SDK of this one is in the middle of a collection here for ever.
    other, other_reader = make_provider()
    report(SpecDecRecorder(other), "g", 7)
    report(SpecDecRecorder(provider), "g", 7)
    return accepted(other_reader)
child = in_child(work)
done.set()
collector.join(30)
print(json.dumps([child, accepted(reader)]))
""")
    assert (child, parent) == (7, 5)


def test_grandchildren_export_only_their_own_counts_too() -> None:
    (grandchild, child), parent = value("""
recorder = SpecDecRecorder(provider)
report(recorder, "g", 100)
def child():
    report(recorder, "h", 10)
    def grandchild():
        report(recorder, "i", 1)
        return accepted(reader)
    return [in_child(grandchild), accepted(reader)]
print(json.dumps([in_child(child), accepted(reader)]))
""")
    assert (grandchild, child, parent) == (1, 10, 100)


def test_an_early_recorder_s_child_counts_only_its_own() -> None:
    child, parent = value("""
from opentelemetry import metrics
recorder = SpecDecRecorder()
metrics.set_meter_provider(provider)
report(recorder, "g", 100)
def work():
    report(recorder, "h", 7)
    return accepted(reader)
print(json.dumps([in_child(work), accepted(reader)]))
""")
    assert (child, parent) == (7, 100)
