"""What goes wrong around the collector: it is killed, its backend goes away, and what it is sent is garbage."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, AGGREGATION_TEMPORALITY_DELTA

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from otel_specdec import names
from otel_specdec.names import Metric
from tests.collector import gauges
from tests.collector.fleet import COUNTS, Replica, non_zero, truth_of
from tests.collector.processes import Collector, Prometheus, eventually, post
from tests.collector.test_fleet import gauges_in


def counted(prometheus: Prometheus, metric: Metric) -> dict[tuple[tuple[str, str], ...], list[float]]:
    name = metric.value.replace(".", "_") + "_total"
    return {
        tuple(sorted(labels.items())): [value for _, value in samples]
        for labels, samples in prometheus.samples(name, 3600)
    }


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_restart_under_traffic_loses_no_counter_and_doubles_no_ratio(tmp_path: Path, how: signal.Signals) -> None:
    window_s, pace_s, rounds = 2, 0.25, 45
    with Prometheus(tmp_path / "prometheus") as prometheus:
        collector = Collector(tmp_path / "collector", prometheus.otlp, window=f"{window_s}s").start()
        try:
            replicas = [Replica(f"r{n}", delta=n >= 4) for n in range(6)]
            refused: dict[str, list[bytes]] = {replica.instance: [] for replica in replicas}
            for round_ in range(rounds):
                if round_ == 15:
                    collector.stop(how)
                    went = time.monotonic()
                if round_ == 20:
                    collector.start()
                    away_s = time.monotonic() - went
                for replica in replicas:
                    replica.add(accepted=7, proposed=10, verify=3, emitted=10, completion=10, generations=1)
                    # As exporters do: what was not taken is tried again, in its order.
                    waiting = [*refused[replica.instance], replica.collect()]
                    while waiting and post(f"{collector.http}/v1/metrics", waiting[0]) == 200:
                        waiting.pop(0)
                    refused[replica.instance] = waiting
                time.sleep(pace_s)
            assert not any(refused.values())
            # The backend has every token, whatever happened in between: from producers of deltas too, whose counter
            # begins anew with the collector.
            for metric, per_round in PER_ROUND.items():
                assert eventually(lambda m=metric: grown(prometheus, m) == [rounds * PER_ROUND[m]] * 6, 15, 0.5), (  # type: ignore[misc]
                    metric, grown(prometheus, metric), rounds * per_round,
                )  # fmt: skip
            time.sleep(window_s + 2)
            found = gauges_in(prometheus)
            truth = truth_of(replicas)
            total = gauges.sums(found)  # checks each quotient, and that nothing is negative
            assert {window.values.get("accept_rate", 0.7) for window in found} == {0.7}
            for key, value in non_zero(truth).items():
                assert total[key] <= value
            # The gauges have a hole: what the window held when the process died, the time until the next one, and its
            # first window, which only tells where the counters stand.
            lost = truth["m", "engine", "generations"] - total["m", "engine", "generations"]
            print(f"{how.name}: away for {away_s:.1f} s, gauges lack {lost / 6 * pace_s:.1f} s of traffic")
            assert 0 < lost / 6 * pace_s < away_s + 2 * window_s + 1
        finally:
            collector.stop()


def grown(prometheus: Prometheus, metric: Metric) -> list[float]:
    """By how much each series of a counter grew in all, from its samples; one that falls has begun anew."""
    found = []
    for values in counted(prometheus, metric).values():
        total = 0.0
        for before, after in zip([0.0, *values], values, strict=False):
            total += after - before if after >= before else after
        found.append(total)
    return found


PER_ROUND = {
    COUNTS["accepted"]: 7,
    COUNTS["proposed"]: 10,
    COUNTS["verify"]: 3,
    COUNTS["emitted"]: 10,
    COUNTS["completion"]: 10,
    COUNTS["generations"]: 1,
}


def test_a_backend_that_was_away_gets_all_it_missed_even_after_a_kill(tmp_path: Path, receiver: OtlpReceiver) -> None:
    collector = Collector(tmp_path, receiver.http_endpoint, window="1s").start()
    try:
        replicas = [Replica("a"), Replica("b", delta=True)]
        for replica in replicas:
            replica.export(collector.http)
        time.sleep(2.5)
        receiver.stop()
        for _ in range(4):
            for replica in replicas:
                replica.add(accepted=3, proposed=4, generations=1)
                replica.export(collector.http)
            time.sleep(0.5)
        time.sleep(1.5)  # the last window is in the queue, on disk
        collector.stop(signal.SIGKILL)
        receiver.start()
        collector.start()
        wanted = non_zero(truth_of(replicas))
        arrived = eventually(lambda: non_zero(gauges.sums(gauges.windows(receiver.points()))) == wanted, 20, 0.5)
        assert arrived, gauges.sums(gauges.windows(receiver.points()))

        # The counters have a queue of their own, which may come after the gauges'.
        def accepted() -> dict[str, int | float]:
            points = receiver.streams(Metric.ACCEPTED)
            return {str(point.resource_attributes["service.instance.id"]): point.value for point in points}

        assert eventually(lambda: accepted() == {"a": 12, "b": 12}, 20, 0.5), accepted()
    finally:
        collector.stop()


def bad_inputs(dice: random.Random, good: Callable[[], bytes]) -> bytes:
    """One request that no correct producer sends."""
    kind = dice.randrange(8)
    body = bytearray(good())
    if kind == 0:  # bytes that are no protobuf
        return dice.randbytes(dice.randint(0, 400))
    if kind == 1:  # cut off
        return bytes(body[: dice.randrange(len(body))])
    if kind == 2:  # flipped bits
        for _ in range(dice.randint(1, 8)):
            body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
        return bytes(body)
    request = ExportMetricsServiceRequest()
    request.ParseFromString(bytes(body))
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.sum.data_points:
                    if kind == 3:
                        point.as_double = dice.choice([math.nan, math.inf, -math.inf, -1.5, 1e300, 0.0, 7.0])
                    elif kind == 4:
                        point.as_int = dice.choice([-1, -(2**63)])
                    elif kind == 5:
                        point.flags = 1
                    elif kind == 6:
                        big = point.attributes.add()
                        big.key = dice.choice([names.RATIO_SET, names.MODEL, "k" * dice.randint(1, 20000), ""])
                        if dice.random() < 0.5:
                            big.value.string_value = "v" * dice.randint(0, 60000)
                        else:
                            big.value.kvlist_value.values.add().key = "deep"
                if kind == 7:
                    points = list(metric.sum.data_points)
                    temporality: Any = dice.choice(
                        [0, AGGREGATION_TEMPORALITY_DELTA, AGGREGATION_TEMPORALITY_CUMULATIVE]
                    )
                    if dice.random() < 0.5:
                        metric.gauge.data_points.extend(points)
                    else:
                        metric.sum.is_monotonic = False
                        metric.sum.aggregation_temporality = temporality
    return request.SerializeToString()


def test_ten_thousand_bad_inputs(tmp_path: Path, receiver: OtlpReceiver) -> None:
    dice = random.Random(8)
    with Collector(tmp_path, receiver.http_endpoint, window="2s") as collector:
        good = [Replica(f"good-{n}", delta=n == 1) for n in range(3)]
        # Broken ones under an identity of their own: a forged point of a replica's own stream is that replica's word.
        bad = Replica("bad", model="bad", service="bad", environment="bad")
        bad.add(accepted=1, proposed=2, verify=1, emitted=2, completion=2, generations=1)
        template = bad.collect()
        statuses: dict[int, int] = {}
        for number in range(10_000):
            status = post(f"{collector.http}/v1/metrics", bad_inputs(dice, lambda: template))
            statuses[status] = statuses.get(status, 0) + 1
            if number % 250 == 0:
                for replica in good:
                    replica.add(accepted=9, proposed=10, verify=3, emitted=12, completion=13, generations=1)
                    replica.export(collector.http)
        assert collector.healthy()
        assert collector.child is not None
        memory = collector.child.memory_bytes()
        wanted = non_zero(truth_of(good))

        def of_the_good() -> list[gauges.Window]:
            return [w for w in gauges.windows(receiver.points()) if w.service == "vllm" and w.model == "m"]

        assert eventually(lambda: non_zero(gauges.sums(of_the_good())) == wanted, 20, 1), gauges.sums(of_the_good())
        assert all(window.values.get("accept_rate", 0.9) == 0.9 for window in of_the_good())
        for point in receiver.points():
            if point.metric.startswith(gauges.POOL):
                assert math.isfinite(point.value), point
                assert point.value >= 0, point
        print(f"answers by status: {dict(sorted(statuses.items()))}; memory {memory / 1e6:.0f} MB")
        assert set(statuses) <= {200, 400}, statuses
        assert statuses[400] > 1000
        assert memory < 600e6
