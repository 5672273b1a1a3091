"""Fifty replicas, three models, and everything that goes wrong with exports: exact to the token all the same."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from collector.mixin.prometheus_names import MODEL, RATIOS, SOURCE
from examples.vllm_demo.otlp_receiver import OtlpReceiver
from otel_specdec import names
from tests.collector import gauges, recorded
from tests.collector.conftest import RULES
from tests.collector.fleet import ALL, Replica, Truth, non_zero, truth_of
from tests.collector.processes import Collector, Prometheus, eventually

SECONDS = float(os.environ.get("FLEET_SECONDS", "60"))
"""Of traffic; below 270, because the collector's recorded names must hold all of it."""
REPLICAS = 50
MODELS = ("llama", "qwen", "deepseek")
INCOMPLETE = [
    frozenset({names.TOKENS_PER_VERIFY}),
    frozenset({names.ACCEPT_RATE}),
    frozenset({names.ACCEPT_RATE, names.ACCEPTANCE_LENGTH}),
    frozenset[str](),
]


@dataclass
class Fleet:
    """Random traffic; the same seed is the same traffic, whatever the machine's pace."""

    random: random.Random
    replicas: list[Replica] = field(default_factory=list)
    due: dict[int, float] = field(default_factory=dict)
    restarts: int = 0
    repeats: int = 0
    exports: int = 0

    def begin(self) -> None:
        for number in range(REPLICAS):
            self.replicas.append(
                Replica(
                    f"replica-{number}",
                    model=MODELS[number % 3],
                    # Ports of both kinds of producer: an engine, and clients that record responses.
                    source=names.RESPONSE if number % 5 == 4 else names.ENGINE,
                    version=self.random.choice(["0.1.0", "0.2.0", "1.0.0"]),
                    skew=self.random.uniform(-5, 5),
                    delta=number % 3 == 0 or number % 7 == 0,
                    positions=2,
                )
            )

    def traffic(self, replica: Replica) -> None:
        for _ in range(self.random.randint(0, 6)):
            verify = self.random.randint(0, 40)
            proposed = sum(self.random.randint(1, 5) for _ in range(verify))
            accepted = self.random.randint(0, proposed)
            emitted = max(0, accepted + verify - self.random.randint(0, 3))
            completion = emitted + self.random.randint(0, 20)
            holding = ALL if self.random.random() < 0.8 else self.random.choice(INCOMPLETE)
            replica.add(
                holding, accepted=accepted, proposed=proposed, verify=verify, emitted=emitted, completion=completion,
                generations=1,
            )  # fmt: skip

    def step(self, now: float, endpoint: str, direct: str) -> None:
        for number, replica in enumerate(self.replicas):
            if now < self.due.get(number, 0):
                continue
            # Number 1 is ten times slower than the others.
            self.due[number] = now + self.random.uniform(0.7, 1.7) * (10 if number == 1 else 1)
            self.export(replica, endpoint, direct)
            dice = self.random.random()
            if dice < 0.02:
                replica.restart()
                self.restarts += 1
            elif dice < 0.04:
                replica.restart(f"replica-{number}-{self.restarts}")
                self.restarts += 1
            elif dice < 0.14:
                self.repeats += 1
                back = self.random.randint(1, 3)
                replica.repeat(endpoint, back)
                if not replica.delta:
                    replica.repeat(direct, back)
            self.traffic(replica)  # for its next export: no process counts in the millisecond in which it exports

    def export(self, replica: Replica, endpoint: str, direct: str) -> None:
        replica.export(endpoint)
        self.exports += 1
        if not replica.delta:  # Prometheus itself takes no deltas
            replica.repeat(direct)


def of_cumulative(replicas: list[Replica]) -> Truth:
    return truth_of([replica for replica in replicas if not replica.delta])


@pytest.mark.parametrize("seed", [8])
def test_every_token_of_the_fleet_is_in_the_sums_once(tmp_path: Path, short_exact_rules: Path, seed: int) -> None:
    behind = Prometheus(tmp_path / "behind", [short_exact_rules, RULES / "specdec_collector.rules.yml"])
    alone = Prometheus(tmp_path / "alone", [short_exact_rules, RULES / "specdec.rules.yml"])
    with behind, alone, Collector(tmp_path / "collector", behind.otlp, window="3s") as collector:
        time.sleep(6)  # a replica whose clock is five seconds slow was still born after the collector started
        fleet = Fleet(random.Random(seed))
        fleet.begin()
        started = time.monotonic()
        while (now := time.monotonic()) < started + SECONDS:
            fleet.step(now, collector.http, alone.otlp)
            time.sleep(0.05)
        for replica in fleet.replicas:
            fleet.traffic(replica)
        time.sleep(0.5)
        for replica in fleet.replicas:
            fleet.export(replica, collector.http, alone.otlp)
        ended = time.time()
        truth, truth_alone = truth_of(fleet.replicas), of_cumulative(fleet.replicas)

        # The collector's gauges, from the Prometheus behind it: every window's sums, and quotients of exactly these.
        def from_gauges() -> Truth:
            return gauges.sums(gauges_in(behind))

        assert eventually(lambda: non_zero(from_gauges()) == non_zero(truth), 15, 1), (from_gauges(), truth)
        windows = gauges_in(behind)
        assert {(window.model, window.source) for window in windows} == {(m, s) for m, s, _ in truth}
        assert len(windows) > 6 * SECONDS / 3 * 0.7

        # The recorded names from those gauges: five minutes hold the whole run, the next evaluation all of it.
        time.sleep(2.5)
        for model, source in sorted({(m, s) for m, s, _ in truth}):
            for ratio in RATIOS:
                above, below = (truth[model, source, f"{half}.{ratio}"] for half in ("numerator", "denominator"))
                on = f'{{{MODEL}="{model}", {SOURCE}="{source}"}}'
                assert behind.value(f"specdec:{ratio}:ratio_rate5m{on}") == pytest.approx(above / below, rel=1e-12)
                covered, generations = truth[model, source, f"covered.{ratio}"], truth[model, source, "generations"]
                coverage = f'specdec:coverage:ratio_rate5m{{ratio="{ratio}", {on[1:]}'
                assert behind.value(coverage) == pytest.approx(covered / generations, rel=1e-12)

        # The exact rules, on the counters that passed through the collector and on those that did not.
        # Clocks are up to 5 s ahead, a window is 5 s long and is judged 8 s after its end.
        time.sleep(max(0.0, ended + 5 + 5 + 8 + 2 - time.time()))
        for prometheus, expected in ((behind, truth), (alone, truth_alone)):
            assert non_zero(recorded.totals(prometheus)) == non_zero(expected)
            assert recorded.check_quotients(prometheus) > 100

        # The stock rules, on the same counters: their error.
        errors = {half: [] for half in ("ratio", "numerator")}  # type: dict[str, list[float]]
        for (model, source, name), above in sorted(truth_alone.items()):
            if name.startswith("numerator."):
                ratio = name.removeprefix("numerator.")
                below = truth_alone[model, source, f"denominator.{ratio}"]
                on = f'{{{MODEL}="{model}", {SOURCE}="{source}"}}'
                stock = alone.value(f"specdec:{ratio}:ratio_rate5m{on}")
                total = alone.value(f"specdec:{ratio}:numerator_rate5m{on}")
                assert stock is not None
                assert total is not None
                errors["ratio"].append(abs(stock / (above / below) - 1))
                errors["numerator"].append(abs(total * 300 / above - 1))
        print(f"{len(windows)} windows; {fleet.exports} exports, {fleet.repeats} repeated, {fleet.restarts} restarts")
        print(f"tokens and steps: {sum(truth.values())}, in the sums: {sum(from_gauges().values())}")
        for half, found in errors.items():
            print(f"stock rules, {half}: off by {sum(found) / len(found):.2%} on average, {max(found):.2%} at most")
        assert max(errors["ratio"]) < 0.1


def gauges_in(prometheus: Prometheus) -> list[gauges.Window]:
    """The collector's gauges as Prometheus holds them."""
    found: dict[tuple[float, str, str], gauges.Window] = {}
    for labels, samples in prometheus.samples('{__name__=~"specdec_pool_.+"}', 3600):
        name = labels["__name__"].removeprefix("specdec_pool_")
        for half in ("numerator", "denominator", "covered", "coverage"):
            if name.startswith(f"{half}_"):
                name = name.replace("_", ".", 1)
        if name.endswith("_ratio"):  # Prometheus' suffix for a gauge with unit 1
            name = name.removesuffix("_ratio")
        for at, value in samples:
            key = (at, labels[MODEL], labels[SOURCE])
            window = found.setdefault(key, gauges.Window(int(at * 1000), labels["job"], labels[MODEL], labels[SOURCE]))
            assert name not in window.values
            window.values[name] = value
    return sorted(found.values(), key=lambda window: window.time)


@pytest.mark.parametrize("window", ["1s"])
def test_a_batch_that_is_sent_again_counts_once(tmp_path: Path, receiver: OtlpReceiver, window: str) -> None:
    with Collector(tmp_path, receiver.http_endpoint, window=window) as collector:
        replicas = [Replica("cumulative"), Replica("delta", delta=True)]
        for replica in replicas:
            for _ in range(6):
                replica.add(accepted=3, proposed=4, generations=1)
                replica.export(collector.http)
                replica.repeat(collector.http, 1)
                replica.repeat(collector.http, 2)
                time.sleep(0.2)
        time.sleep(2.5)
        assert non_zero(gauges.sums(gauges.windows(receiver.points()))) == non_zero(truth_of(replicas))
