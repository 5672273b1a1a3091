from __future__ import annotations

import gc
import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from opentelemetry.metrics import CallbackOptions, MeterProvider
from opentelemetry.sdk.metrics import AlwaysOnExemplarFilter
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.trace import TracerProvider

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from otel_specdec.instrumentors import EngineCounters, EngineSource
from otel_specdec.names import RATIOS, Metric
from otel_specdec.sums import Harvest, Pool, Series, pool_for
from tests.unit.at_once import Yielding, in_threads
from tests.unit.collected import (
    ACCEPTED_AT,
    ERRORS,
    FIELD_OF_METRIC,
    PROPOSED_AT,
    Meter,
    Point,
    counted,
    in_memory_reader,
    points,
    totals,
)
from tests.unit.engine_stand_in import BrokenTally, HandTally, description

FULL = "accept_rate,acceptance_length,tokens_per_verify"
logger = logging.getLogger("otel_specdec")


@pytest.fixture
def meter() -> Meter:
    return Meter()


def engine_of(provider: MeterProvider, tally: HandTally | None = None, **fields: Any) -> HandTally:
    """An engine that has started and counts into `provider`."""
    tally = tally or HandTally()
    EngineCounters(provider, logger).engine_started(description(**fields), tally, lambda: True)
    return tally


def final(generation: str, *counts: int, **fields: Any) -> GenerationReport:
    return GenerationReport(generation, SpecCounts(*counts), **fields)


# One pool for each provider


def test_there_is_one_pool_for_each_provider(meter: Meter) -> None:
    other = Meter()
    assert pool_for(meter.provider) is pool_for(meter.provider)
    assert pool_for(meter.provider) is not pool_for(other.provider)


def test_two_recorders_and_an_engine_share_a_provider_and_nothing_is_lost_or_doubled(meter: Meter) -> None:
    recorders = [SpecDecRecorder(meter.provider), SpecDecRecorder(meter.provider)]
    tally = engine_of(meter.provider)
    for n in range(10):
        for recorder in recorders:
            recorder.record(final(str(n), 1, 2, 1, 3, 2))
        tally.put(1, 2, 1, 2, 2, generations=1)
        meter.points()
    by_source: dict[str, Counter[str]] = {"engine": Counter(), "response": Counter()}
    for point in meter.points(*FIELD_OF_METRIC):
        by_source[point.attributes["specdec.source"]][FIELD_OF_METRIC[point.name]] += point.value
    assert by_source["engine"] == counted(
        accepted=10, proposed=20, verify=10, completion=20, emitted=20, generations=10
    )
    assert by_source["response"] == counted(
        accepted=20, proposed=40, verify=20, completion=60, emitted=40, generations=20
    )


def test_providers_do_not_share_their_sums() -> None:
    meters = [Meter(), Meter()]
    for n, meter in enumerate(meters, start=1):
        SpecDecRecorder(meter.provider).record(final("g", n))
        engine_of(meter.provider).put(n)
    assert [meter.totals()["accepted"] for meter in meters] == [2, 4]


def test_a_provider_that_is_gone_takes_its_pool_with_it() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    recorder.record(final("g", 1))
    meter.provider.shutdown()
    alive = {id(pool) for pool in all_pools()}
    del meter, recorder
    assert len(alive - {id(pool) for pool in all_pools()}) == 1


def all_pools() -> list[Pool]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Pool]


# Every collection is exact


def test_readers_of_either_temporality_get_everything_once() -> None:
    readers = [in_memory_reader(delta=delta) for delta in (True, False, True)]
    provider = SdkMeterProvider(readers, shutdown_on_exit=False)
    recorder, tally = SpecDecRecorder(provider), engine_of(provider)
    expected = counted()
    sums = [Counter[str](), Counter[str](), Counter[str]()]
    chance = random.Random(1)

    def collect(number: int) -> None:
        now = totals(points(readers[number].get_metrics_data()))
        sums[number] = sums[number] + Counter(now) if number != 1 else Counter(now)
        assert {**counted(), **sums[number]} == expected

    for n in range(200):
        if chance.random() < 0.6:
            counts = (chance.randrange(3), 4, 1, chance.randrange(1, 9), 1)
            recorder.record(final(str(n), *counts))
            tally.put(*counts, generations=1)
            for field, value in zip((*FIELD_OF_METRIC.values(),), (*counts, 1), strict=True):
                expected[field] += 2 * value
        if chance.random() < 0.5:
            collect(chance.randrange(3))
    for number in range(3):
        collect(number)


def test_what_a_running_generation_has_done_is_in_a_collection(meter: Meter) -> None:
    tally = engine_of(meter.provider)
    tally.put(3, 4, 1, 4, 4)
    assert meter.totals() == counted(accepted=3, proposed=4, verify=1, completion=4, emitted=4)


def test_shutdown_exports_what_is_pending() -> None:
    collected: list[int] = []

    class Exporting(type(in_memory_reader(delta=False))):  # type: ignore[misc]  # a class from a call
        def _receive_metrics(self, data: Any, *args: Any, **kwargs: Any) -> None:
            collected.append(totals(points(data)).get("accepted", 0))

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
            self.collect()

    provider = SdkMeterProvider([Exporting()], shutdown_on_exit=False)
    SpecDecRecorder(provider).record(final("g", 7))
    provider.shutdown()
    assert collected == [7]


def test_threads_add_while_others_collect_and_the_sums_are_exact() -> None:
    readers = [in_memory_reader(delta=True), in_memory_reader(delta=False)]
    provider = SdkMeterProvider(readers, shutdown_on_exit=False)
    pool, done, by_delta = pool_for(provider), threading.Event(), Counter[str]()
    series = [Series.of(Metric.ACCEPTED, {"thread": n}) for n in range(4)]
    shared = Series.of(Metric.PROPOSED, {})

    def add(own: Series) -> None:
        for _ in range(2000):
            pool.add([(own, 1), (shared, 2)])

    def collect() -> None:
        while not done.is_set():
            by_delta.update(totals(points(readers[0].get_metrics_data())))
            readers[1].get_metrics_data()

    collector = threading.Thread(target=collect)
    adders = [threading.Thread(target=add, args=(own,)) for own in series]
    for thread in (collector, *adders):
        thread.start()
    for thread in adders:
        thread.join(timeout=60)
    done.set()
    collector.join(timeout=60)
    by_delta.update(totals(points(readers[0].get_metrics_data())))
    assert by_delta == totals(points(readers[1].get_metrics_data())) == {"accepted": 8000, "proposed": 16000}


def test_threads_that_add_to_the_same_series_lose_nothing(meter: Meter) -> None:
    pool = pool_for(meter.provider)
    series = Series.of(Metric.ACCEPTED, {Yielding("key"): "value"})

    def work(number: int) -> None:
        for _ in range(20):
            pool.add([(series, 1)])
            if number == 0:
                meter.points()

    in_threads(work, threads=8)
    assert meter.totals() == {"accepted": 160}


def test_the_drain_is_in_no_collection(meter: Meter) -> None:
    engine_of(meter.provider).put(1)
    assert {point.name for point in meter.points()} == {*FIELD_OF_METRIC, ACCEPTED_AT, PROPOSED_AT}


# No trace of somebody else's span


@pytest.mark.parametrize("at_once", [True, False])
def test_a_collection_inside_somebody_s_span_gives_our_points_no_trace(at_once: bool) -> None:
    meter = Meter(exemplar_filter=AlwaysOnExemplarFilter())
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("somebody")
    with tracer.start_as_current_span("births, reports and a collection"):
        tally = engine_of(meter.provider)
        recorder = SpecDecRecorder(meter.provider)
        recorder.record(final("g", 1, 2, 1, 3, 2))
        recorder.record(final("g", 9, 9, 9, 9, 9))
        tally.put(1, 2, 1, 2, 2, generations=1, accepted_by_position=[1, 0], proposed_by_position=[1, 1])
        pool_for(meter.provider).error(ValueError(), "testing")
        if at_once:
            found = meter.points()
    if not at_once:
        found = meter.points()
    assert len(found) > 10
    for point in found:
        for exemplar in point.exemplars:
            assert exemplar.trace_id is None
            assert exemplar.span_id is None


# Births


def expected_series(k: int) -> Counter[tuple[str, str | int]]:
    """Names with the ratio set or the position."""
    sets = {
        "specdec.accepted_tokens": "accept_rate",
        "specdec.proposed_tokens": "accept_rate",
        "specdec.verify_steps": "acceptance_length,tokens_per_verify",
        "specdec.completion_tokens": "tokens_per_verify",
        "specdec.emitted_tokens": "acceptance_length",
        "specdec.generations": FULL,
    }
    at_positions = [(metric, position) for metric in (ACCEPTED_AT, PROPOSED_AT) for position in range(k)]
    return Counter([*sets.items(), *at_positions])


def of_points(found: Iterable[Point]) -> Counter[tuple[str, str | int]]:
    return Counter(
        (point.name, point.attributes.get("specdec.ratio_set", point.attributes.get("specdec.position")))  # type: ignore[misc]  # one of the two is there
        for point in found
    )


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("k", [1, 5, 32])
def test_every_series_an_engine_can_produce_begins_at_zero(delta: bool, k: int) -> None:
    meter = Meter(delta=delta)
    engine_of(meter.provider, max_drafts=k)
    found = meter.points()
    assert of_points(found) == expected_series(k)
    assert {point.value for point in found} == {0}
    assert len(found) == 6 + 2 * k


def test_an_engine_has_at_most_twenty_series_at_k_five(meter: Meter) -> None:
    tally = engine_of(meter.provider, max_drafts=5)
    ups = [5, 4, 3, 2, 1] + [0] * 27
    tally.put(15, 25, 5, 20, 20, generations=1, accepted_by_position=ups, proposed_by_position=ups)
    assert len(meter.points()) <= 20


def test_series_beyond_the_last_position_do_not_exist(meter: Meter) -> None:
    tally = engine_of(meter.provider, max_drafts=100)
    tally.put(100, 100, 1, 101, 101, accepted_by_position=[1] * 32, proposed_by_position=[1] * 32)
    assert len(meter.points(ACCEPTED_AT)) == len(meter.points(PROPOSED_AT)) == 32


def test_what_an_engine_does_goes_to_the_series_that_were_born(meter: Meter) -> None:
    tally = engine_of(meter.provider)
    born = {point.series for point in meter.points()}
    tally.put(3, 4, 2, 5, 5, generations=1, accepted_by_position=[2, 1], proposed_by_position=[2, 2])
    found = meter.points()
    assert {point.series for point in found} == born
    assert all(point.value for point in found)


@pytest.mark.parametrize("delta", [False, True])
def test_no_expected_series_is_born_inside_a_collection(delta: bool) -> None:
    """A stream born there has its start equal to its time, and loses its first increment in Prometheus."""
    meter = Meter(delta=delta)
    tally, recorder = engine_of(meter.provider), SpecDecRecorder(meter.provider)
    recorder.record(final("g", 1, 2, 1, 3, 2, accepted_by_position=[1], proposed_by_position=[2]))
    recorder.record(final("g", 1, 2, 1, 3, 2))
    tally.put(3, 4, 2, 5, 5, generations=1, accepted_by_position=[2, 1], proposed_by_position=[2, 2])
    time.sleep(0.001)
    before = time.time_ns()
    found = meter.points()
    assert len(found) == (6 + 4) + (6 + 2) + 1
    for point in found:
        assert point.start < before < point.time


def test_a_series_that_nobody_expected_is_a_millisecond_older_than_its_first_point(meter: Meter) -> None:
    """Else Prometheus takes its start for none, and its first increment is lost there."""
    tally = engine_of(meter.provider)
    seen = {point.series for point in meter.points()}
    for holding in map(frozenset, itertools.combinations(RATIOS, 2)):
        tally.put(1, 2, 1, 3, 2, generations=1, ratios=holding)
        new = [point for point in meter.points() if point.series not in seen]
        assert new
        assert all(point.start // 1_000_000 < point.time // 1_000_000 for point in new)
        seen.update(point.series for point in new)


def test_a_zero_is_added_to_a_series_that_nobody_has_seen(meter: Meter) -> None:
    pool_for(meter.provider).add([(Series.of(Metric.VERIFY, {}), 0)])
    assert meter.totals() == {"verify": 0}


def test_a_zero_of_a_source_begins_a_series_that_nobody_has_seen(meter: Meter) -> None:
    class Zero:
        ended = False

        def take(self) -> Harvest:
            return Harvest([(Series.of(Metric.VERIFY, {}), 0)])

    pool_for(meter.provider).attach(Zero())
    assert meter.totals() == {"verify": 0}


# Two thousand attribute sets


def test_a_counter_stops_at_two_thousand_attribute_sets(meter: Meter) -> None:
    pool = pool_for(meter.provider)
    for n in range(2_100):
        pool.add([(Series.of(Metric.ACCEPTED, {"n": n}), 1)])
    pool.add([(Series.of(Metric.ACCEPTED, {"n": 0}), 1), (Series.of(Metric.PROPOSED, {"n": 9_999}), 1)])
    found = {tuple(point.attributes.items()): point.value for point in meter.points("specdec.accepted_tokens")}
    assert len(found) == 2_000
    assert found[("otel.metric.overflow", True),] == 2_100 - 1_999
    assert found[("n", 0),] == 2
    assert found[("n", 1_998),] == 1
    assert sum(found.values()) == 2_101
    (other,) = meter.points("specdec.proposed_tokens")
    assert other.attributes == {"n": 9_999}


def test_overflow_loses_nothing_over_many_collections() -> None:
    meter = Meter(delta=True)
    pool, seen = pool_for(meter.provider), 0
    for n in range(4_000):
        pool.add([(Series.of(Metric.ACCEPTED, {"n": n}), 1)])
        if n % 500 == 499:
            seen += meter.totals()["accepted"]
    assert seen == 4_000


# An error of ours goes nowhere but into a counter


def test_a_source_that_fails_is_counted_and_logged_once_and_the_others_are_not_affected(
    meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine_of(meter.provider, index=0)
    engine_of(meter.provider, BrokenTally(), index=1)
    last = engine_of(meter.provider, index=2)
    recorder = SpecDecRecorder(meter.provider)
    for n in range(3):
        first.put(1)
        last.put(10)
        recorder.record(final(str(n), 100))
        meter.points()
    assert meter.totals()["accepted"] == 3 * 111
    assert meter.errors() == {"RuntimeError": 4}
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "RuntimeError: this tally is broken" in caplog.text
    assert line.exc_info


def test_errors_carry_their_type_and_source_and_nothing_that_names_a_generation(meter: Meter) -> None:
    class Odd(Exception):
        pass

    pool = pool_for(meter.provider)
    pool.error(Odd("secret text"), "testing")
    pool.error(ValueError("secret text"), "testing", "response")
    found = meter.points(ERRORS)
    assert sum(point.value for point in found) == 2
    for point in found:
        assert point.attributes.keys() == {"error.type", "specdec.source", "specdec.process"}
        assert "secret" not in str(point.attributes)


def test_the_number_of_kinds_that_are_logged_is_bounded(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_for(meter.provider)
    for n in range(300):
        pool.error(ValueError(), f"doing number {n}")
    assert len(caplog.records) == 100
    assert meter.errors() == {"ValueError": 300}


def test_an_error_whose_logging_fails_goes_nowhere(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(logger, "warning", fail)
    pool_for(meter.provider).error(ValueError(), "testing")


def test_a_source_that_has_ended_is_asked_one_last_time_and_then_forgotten(meter: Meter) -> None:
    tally = engine_of(meter.provider)
    tally.put(5)
    tally.ended = True
    assert meter.totals()["accepted"] == 5
    asked = tally.taken
    meter.points()
    assert meter.totals()["accepted"] == 5
    assert tally.taken == asked == 1


def test_what_comes_while_a_source_ends_is_taken(meter: Meter) -> None:
    class Ending(HandTally):
        def take(self) -> Any:
            taken = super().take()
            if not self.ended:
                self.ended = True
                self.put(7)
            return taken

    engine_of(meter.provider, Ending())
    meter.points()
    assert meter.totals()["accepted"] == 7


class Recording:
    """A counter, and who makes it, of no SDK: it only keeps what it is told, and may refuse."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.added: list[tuple[str, int, Any]] = []
        self.drain: Any = None
        self.name = ""
        self.provider = self

    def get_meter(self, *args: Any, **kwargs: Any) -> Recording:
        return self

    def create_counter(self, name: str, **kwargs: Any) -> Recording:
        counter = Recording()
        counter.name, counter.added, counter.provider = name, self.added, self
        return counter

    def create_observable_gauge(self, name: str, callbacks: list[Any], **kwargs: Any) -> None:
        (self.drain,) = callbacks

    def add(self, amount: int, attributes: dict[str, Any], context: Any = None) -> None:
        if self.name == self.provider.refuses:
            raise OSError("this counter refuses")
        self.added.append((self.name, amount, context))

    def collect(self) -> None:
        assert list(self.drain(CallbackOptions())) == []


def test_a_counter_that_fails_is_counted_and_does_not_affect_the_others() -> None:
    provider: Any = Recording()
    pool = pool_for(provider)
    pool.birth([Series.of(metric, {}) for metric in Metric])
    provider.refuses = "specdec.accepted_tokens"
    pool.add([(Series.of(Metric.ACCEPTED, {}), 1), (Series.of(Metric.PROPOSED, {}), 2)])
    provider.collect()
    provider.collect()
    assert {(name, amount) for name, amount, _ in provider.added if amount} == {
        ("specdec.proposed_tokens", 2),
        ("specdec.instrumentation.errors", 1),
    }


def test_everything_is_added_with_a_context_that_is_not_empty_and_holds_no_span() -> None:
    provider: Any = Recording()
    pool = pool_for(provider)
    pool.add([(Series.of(Metric.ACCEPTED, {}), 1)])
    provider.collect()
    assert len(provider.added) == 2
    for _, _, context in provider.added:
        assert context
        assert all("span" not in key for key in context)


# The process attribute


def processes(meter: Meter) -> Iterator[str]:
    engine_of(meter.provider, index=3)
    SpecDecRecorder(meter.provider).record(final("g", 1))
    return iter(sorted({point.attributes["specdec.process"] for point in meter.points()}))


def test_an_engine_s_process_is_its_role_where_the_resource_has_an_instance_id() -> None:
    engine, recorder = processes(Meter(resource={"service.instance.id": "pod-7"}))
    assert engine == "engine-3"
    assert recorder.startswith("recorder-")


def test_a_random_suffix_follows_where_the_resource_has_no_instance_id() -> None:
    first, second = (next(processes(Meter())) for _ in range(2))
    assert first.startswith("engine-3-")
    assert second.startswith("engine-3-")
    assert first != second


def test_a_recorder_s_process_is_random_with_an_instance_id_too() -> None:
    names = {list(processes(Meter(resource={"service.instance.id": "pod-7"})))[1] for _ in range(3)}
    assert len(names) == 3


# A provider that the application handed over


class Spy(SdkMeterProvider):
    flushes = 0

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        self.flushes += 1
        return super().force_flush(timeout_millis)


def test_an_application_s_provider_is_never_flushed_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otel_specdec.provider.IDLE_SECONDS", 0.01)
    reader = in_memory_reader(delta=True)
    spy = Spy([reader], shutdown_on_exit=False)
    counters, tally = EngineCounters(spy, logger), HandTally()
    counters.engine_started(description(), tally, lambda: True)
    tally.put(10)
    for _ in range(5):
        counters.engine_idle()
        time.sleep(0.01)
    assert spy.flushes == 0
    assert totals(points(reader.get_metrics_data()))["accepted"] == 10


def test_starting_an_engine_never_raises(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    counters = EngineCounters(meter.provider, logger)
    counters.engine_started(None, HandTally(), lambda: True)  # type: ignore[arg-type]  # the point of the test
    counters.engine_idle()
    assert meter.errors() == {"AttributeError": 1}
    broken: Any = object()
    EngineCounters(broken, logger).engine_started(description(), HandTally(), lambda: True)


def test_the_line_that_says_where_an_engine_is_counted(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine_of(meter.provider, index=3, max_drafts=4)
    (line,) = caplog.messages
    assert "stand-in engine 3 (model m, method ngram, k = 4)" in line
    assert "the MeterProvider given to instrument()" in line


def test_an_increment_without_anything_known_is_nothing() -> None:
    tally = HandTally()
    tally.put(None, None, None, None, None)
    assert list(EngineSource(description(), tally, "engine-0").take().sums) == []


def test_what_an_engine_does_not_know_enters_no_ratio(meter: Meter) -> None:
    engine_of(meter.provider).put(3, None, 2, 5, 5, generations=1)
    assert meter.sets()["accepted", "none"] == 3
    assert meter.sets()["generations", "acceptance_length,tokens_per_verify"] == 1
