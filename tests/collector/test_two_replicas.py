"""Two replicas, (1, 2) and (9, 10): the pool's rate is 10/12, not the average 0.70."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from tests.collector import gauges, recorded
from tests.collector.conftest import RULES
from tests.collector.fleet import Replica, non_zero, truth_of
from tests.collector.processes import Collector, Prometheus, eventually


def next_window(receiver: OtlpReceiver) -> Callable[[], gauges.Window]:
    """Waits for the next window of gauges, which has begun when this returns it."""
    seen = len(gauges.windows(receiver.points()))

    def wait() -> gauges.Window:
        nonlocal seen
        assert eventually(lambda: len(gauges.windows(receiver.points())) > seen, 15)
        time.sleep(0.3)  # the batch behind the queue may split a window's gauges in two requests
        found = gauges.windows(receiver.points())
        assert len(found) == seen + 1
        seen += 1
        found[-1].check()
        return found[-1]

    return wait


def test_pooled_over_windows_exports_versions_and_a_restart(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Collector(tmp_path, receiver.http_endpoint, window="3s") as collector:
        a = Replica("a", version="0.1.0")
        b = Replica("b", version="0.2.0")
        window = next_window(receiver)
        a.export(collector.http)
        b.export(collector.http)
        window()
        for _ in range(3):
            a.add(accepted=1, proposed=2, verify=1, emitted=2, completion=2, generations=1)
            a.export(collector.http)
            time.sleep(0.4)  # another time, another export
            b.add(accepted=9, proposed=10, verify=3, emitted=12, completion=13, generations=1)
            b.export(collector.http)
            pooled = window().values
            assert pooled["accept_rate"] == 10 / 12
            assert pooled["acceptance_length"] == 14 / 4
            assert pooled["tokens_per_verify"] == 15 / 4
            assert pooled["coverage.accept_rate"] == 1
        # Idle: both still export, and there is no ratio.
        a.export(collector.http)
        b.export(collector.http)
        idle = window().values
        assert not {"accept_rate", "acceptance_length", "tokens_per_verify", "coverage.accept_rate"} & set(idle)
        assert idle["denominator.accept_rate"] == 0
        # One restarts under its old id and adds (3, 4), below what it had; the other grows by (3, 6).
        a.restart()
        a.add(accepted=3, proposed=4)
        a.export(collector.http)
        b.add(accepted=3, proposed=6)
        b.export(collector.http)
        assert window().values["accept_rate"] == 0.6
        assert non_zero(gauges.sums(gauges.windows(receiver.points()))) == non_zero(truth_of([a, b]))


@pytest.mark.parametrize("delta", [False, True], ids=["cumulative", "delta"])
def test_a_restart_inside_a_window_keeps_what_the_old_process_counted(
    tmp_path: Path, receiver: OtlpReceiver, delta: bool
) -> None:
    with Collector(tmp_path, receiver.http_endpoint, window="2s") as collector:
        replica = Replica("a", delta=delta)
        replica.export(collector.http)
        for lower in (True, False, True):
            time.sleep(2.1)  # into the next window
            replica.add(accepted=90, proposed=100, generations=1)
            replica.export(collector.http)
            replica.restart()
            # Below where the old process stood, or above it: a restart is told by its start time, not by a fall.
            replica.add(accepted=3 if lower else 300, proposed=5 if lower else 400)
            replica.export(collector.http)
        time.sleep(4.5)
        assert non_zero(gauges.sums(gauges.windows(receiver.points()))) == non_zero(truth_of([replica]))


@pytest.mark.parametrize("delta", [False, True], ids=["cumulative", "delta"])
def test_one_replica_ten_times_slower_and_one_whose_clock_is_wrong(
    tmp_path: Path, receiver: OtlpReceiver, delta: bool
) -> None:
    with Collector(tmp_path, receiver.http_endpoint, window="1s") as collector:
        time.sleep(6)  # a clock that is five seconds slow must not put a replica's birth before the collector's
        fast = Replica("fast", skew=5, delta=delta)
        slow = Replica("slow", skew=-5, delta=delta)
        for round_ in range(20):
            for replica, every in ((fast, 1), (slow, 10)):
                replica.add(accepted=1 + round_, proposed=2 + round_, verify=1, emitted=2, completion=2, generations=1)
                if round_ % every == every - 1:
                    replica.export(collector.http)
            time.sleep(0.3)
        time.sleep(2.5)
        found = gauges.windows(receiver.points())
        assert non_zero(gauges.sums(found)) == non_zero(truth_of([fast, slow]))
        assert len(found) > 5


def test_engines_recorders_models_services_and_environments_stay_apart(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Collector(tmp_path, receiver.http_endpoint, window="2s") as collector:
        replicas = [
            Replica("1"),
            Replica("2", model="n"),
            Replica("3", source="response"),
            Replica("4", service="other"),
            Replica("5", environment="staging"),
            Replica("6", method="eagle3"),
            Replica("7", provider="sglang"),
        ]
        for number, replica in enumerate(replicas, 1):
            replica.add(accepted=number, proposed=10, generations=1)
            replica.export(collector.http)
        time.sleep(3.5)
        rates = sorted(point.value for point in receiver.points("specdec.pool.accept_rate"))
        assert rates == [number / 10 for number in range(1, 8)]


def test_the_rules_on_a_running_prometheus(tmp_path: Path, short_exact_rules: Path) -> None:
    rules = [short_exact_rules, RULES / "specdec.rules.yml"]
    with Prometheus(tmp_path / "prometheus", rules) as prometheus:
        a = Replica("a", version="0.1.0")
        b = Replica("b", version="0.2.0")
        a.export(prometheus.otlp)
        b.export(prometheus.otlp)
        born = time.time()
        # Each window is judged 8 s late: what counts is where its samples lie.
        recorded.wait_for_window_after(prometheus, born)
        rate = "specdec:accept_rate:ratio_increase1m"
        assert prometheus.samples(rate, 60) == []
        start = recorded.last_window(prometheus)  # windows end every 5 s from here on
        ends = [start + 5 * n for n in range(1, 12)]

        def at_start_of_window() -> float:
            end = next(end for end in ends if end - 4.8 > time.time())
            time.sleep(max(0.0, end - 4.8 - time.time()))
            return end

        expected: dict[float, float | None] = {}
        for _ in range(2):
            end = at_start_of_window()
            a.add(accepted=1, proposed=2)
            a.export(prometheus.otlp)
            time.sleep(0.4)
            b.add(accepted=9, proposed=10)
            b.export(prometheus.otlp)
            expected[end] = 10 / 12
        end = at_start_of_window()  # idle
        a.export(prometheus.otlp)
        b.export(prometheus.otlp)
        expected[end] = None
        end = at_start_of_window()
        a.restart()
        a.add(accepted=3, proposed=4)
        a.export(prometheus.otlp)
        b.add(accepted=3, proposed=6)
        b.export(prometheus.otlp)
        expected[end] = 0.6
        recorded.wait_for_window_after(prometheus, end - 1)
        for end, value in expected.items():
            found = [v for _, samples in prometheus.samples(rate, 120) for at, v in samples if abs(at - end) < 0.5]
            assert found == ([] if value is None else [value]), (end, expected)
        assert non_zero(recorded.totals(prometheus)) == non_zero(truth_of([a, b]))
        # The stock rules see the same counters; they extrapolate, so near is all that can be asked of them.
        stock = prometheus.value("specdec:accept_rate:ratio_rate5m")
        truth = truth_of([a, b])

        def key(half: str) -> tuple[str, str, str]:
            return ("m", "engine", f"{half}.accept_rate")

        exact = truth[key("numerator")] / truth[key("denominator")]
        assert stock == pytest.approx(exact, rel=0.1)
