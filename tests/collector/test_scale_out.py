"""Two tiers: agents beside the engines, and two pool collectors that share the services."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from otel_specdec.names import Metric
from tests.collector import gauges
from tests.collector.fleet import Replica, non_zero, truth_of
from tests.collector.processes import COLLECTOR, Collector, eventually, free_port

SERVICES = [f"service-{n}" for n in range(8)]


@contextmanager
def tiers(folder: Path, backend: str) -> Iterator[tuple[list[Collector], list[Collector]]]:
    """Two agents and two pool collectors."""
    with ExitStack() as stack:
        pools = [
            Collector(
                folder / f"pool-{n}", backend, [COLLECTOR / "scale-out" / "pool.yaml"], "2s", grpc_port=free_port()
            )
            for n in range(2)
        ]
        env = {
            "SPECDEC_POOLS": "[" + ", ".join(pool.grpc for pool in pools) + "]",
            "SPECDEC_AGENT_WINDOW": "1s",
        }
        agents = [
            Collector(folder / f"agent-{n}", backend, [COLLECTOR / "scale-out" / "agent.yaml"], env=env)
            for n in range(2)
        ]
        for each in (*pools, *agents):
            stack.callback(each.stop)
            each.start()
        yield agents, pools


def count(replica: Replica) -> None:
    replica.add(accepted=9, proposed=10, verify=3, emitted=12, completion=13, generations=1)


def test_traffic_in_a_replicas_first_second_is_all_there_and_each_service_is_pooled_in_one_place(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    with tiers(tmp_path, receiver.http_endpoint) as (agents, _):
        time.sleep(1)
        replicas = []
        for n, service in enumerate(SERVICES):
            for agent in agents:  # the replicas of a service are on both nodes
                replica = Replica(f"{service}-{agent.http_port}", service=service, delta=n % 2 == 1)
                count(replica)
                time.sleep(0.02)
                replica.export(agent.http)
                replica.repeat(agent.http)
                replicas.append((replica, agent))
        for _ in range(5):
            for replica, agent in replicas:
                count(replica)
                replica.export(agent.http)
            time.sleep(0.6)
        restarted, agent = replicas[0]
        restarted.restart()
        count(restarted)
        restarted.export(agent.http)
        wanted = non_zero(truth_of([replica for replica, _ in replicas]))
        assert eventually(lambda: non_zero(gauges.sums(gauges.windows(receiver.points()))) == wanted, 10, 0.5)
        for window in gauges.windows(receiver.points()):
            assert window.values.get("accept_rate", 0.9) == 0.9
        # Both agents' replicas of a service meet in one window: its gauges come every two seconds and no oftener.
        for service in SERVICES:
            times = [w.time for w in gauges.windows(receiver.points()) if w.service == service]
            assert all(later - earlier > 1.5e9 for earlier, later in pairwise(times)), service
        # The raw counters take one way only.
        assert receiver.totals(Metric.GENERATIONS) == wanted["m", "engine", "generations"]


def test_services_are_shared_by_the_pool_collectors(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with tiers(tmp_path, receiver.http_endpoint) as (agents, pools):
        replicas = [Replica(service, service=service) for service in SERVICES]
        pools[1].stop(signal.SIGKILL)
        for _ in range(6):
            for replica in replicas:
                count(replica)
                replica.export(agents[0].http)
            time.sleep(0.5)
        served = {window.service for window in gauges.windows(receiver.points())}
        assert 0 < len(served) < len(SERVICES)  # those of the other one wait for it, and keep nobody else waiting
        pools[1].start()
        wanted = non_zero(truth_of(replicas))
        arrived = eventually(lambda: non_zero(gauges.sums(gauges.windows(receiver.points()))) == wanted, 20, 0.5)
        assert arrived, (gauges.sums(gauges.windows(receiver.points())), wanted)


def test_a_service_that_moves_to_another_pool_collector_brings_no_history(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    # What a resolver that follows pods does: the list changes. The agent is the same process life for the streams of
    # both, so its deltas go on; here the two pool collectors change their addresses with each other.
    with tiers(tmp_path, receiver.http_endpoint) as (agents, pools):
        replicas = [Replica(service, service=service) for service in SERVICES]

        def traffic(rounds: int) -> None:
            for _ in range(rounds):
                for replica in replicas:
                    count(replica)
                    replica.export(agents[0].http)
                time.sleep(0.5)

        traffic(8)
        time.sleep(4.5)  # all of it is in the gauges
        before = non_zero(truth_of(replicas))
        assert non_zero(gauges.sums(gauges.windows(receiver.points()))) == before
        for pool in pools:
            pool.stop()
        pools[0].grpc_port, pools[1].grpc_port = pools[1].grpc_port, pools[0].grpc_port
        for pool in pools:
            pool.start()
        traffic(6)
        wanted = non_zero(truth_of(replicas))
        arrived = eventually(lambda: non_zero(gauges.sums(gauges.windows(receiver.points()))) == wanted, 15, 0.5)
        assert arrived, (gauges.sums(gauges.windows(receiver.points())), wanted)
        assert max(window.values["generations"] for window in gauges.windows(receiver.points())) <= 6


@pytest.mark.parametrize("tier", ["agent", "pool"])
def test_the_tiers_do_what_the_one_collector_does(tier: str) -> None:
    one = yaml.safe_load((COLLECTOR / "pipeline.yaml").read_text())
    other = yaml.safe_load((COLLECTOR / "scale-out" / f"{tier}.yaml").read_text())
    own = {"interval/agent"} if tier == "agent" else {"cumulative_to_delta"}
    assert set(other["processors"]) - own <= set(one["processors"])
    for name in set(other["processors"]) - own:
        assert other["processors"][name] == one["processors"][name], name
    assert (other["extensions"], other["receivers"]) == (one["extensions"], one["receivers"])
