"""Exemplars: what they say within 128 characters, whom they name, and that nothing else of anybody's changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, AlwaysOnExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics import Counter as SdkCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.trace import TracerProvider

from otel_specdec import GenerationExemplarFilter, views
from otel_specdec.candidates import PICKS, PLACES, Candidate, Candidates, choose
from otel_specdec.counts import ALL_RATIOS, SpecCounts
from otel_specdec.engines import EngineDescription, Increment, Picked, Taken, TraceIds
from otel_specdec.exemplars import labels_of
from otel_specdec.instrumentors import EngineSource
from otel_specdec.sdk_exemplars import PRIVATE_NAMES, install
from otel_specdec.sums import pool_for

SPAN = trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1))
ENGINE = EngineDescription("vllm", "tiny", "ngram", 4, 0, ALL_RATIOS)


def picked(
    response_id: str = "cmpl-1",
    choice: str | None = None,
    session_id: str | None = None,
    lowest_rate: float | None = None,
) -> Picked:
    return Picked(response_id, 1_000_000_000, 0.5, [], choice=choice, session_id=session_id, lowest_rate=lowest_rate)


# --- What is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runes", "choice", "session", "kept"),
    [
        (10, None, None, "id trace span"),
        (10, "0.2", None, "id trace span choice"),
        (10, "0.2", "s", "id trace span choice"),  # the session goes first, though it is short
        (10, None, "session", "id trace span session"),
        (47, None, None, "id trace span"),  # the longest id with trace and span
        (47, "0.2", None, "id trace choice"),  # then the span
        (47, "0", None, "id trace span"),  # a lone 0 may be the only sequence, and goes before all
        (48, None, None, "id trace"),
        (53, "0.2", None, "id trace choice"),
        (54, "0.2", None, "id trace"),  # then the choice
        (70, None, None, "id trace"),
        (71, None, None, "id"),  # then the trace
        (100, "3", "session", "id"),
        (110, None, None, "id"),
        (111, "3", None, "trace span"),  # an id that does not fit alone is left out, never cut
        (10_000, "0.1", "session", "trace span session"),
    ],
)
def test_labels_go_in_the_contracts_order_until_the_rest_fits(
    runes: int, choice: str | None, session: str | None, kept: str
) -> None:
    response_id = "ü" * runes  # runes, not bytes
    labels = labels_of(picked(response_id, choice, session), SPAN, 1)
    parts = {
        "id": labels.attributes.get("gen_ai.response.id") is not None,
        "trace": labels.trace_id is not None,
        "span": bool(labels.span_id),
        "choice": "specdec.choice" in labels.attributes,
        "session": "gen_ai.conversation.id" in labels.attributes,
    }
    assert {part for part, there in parts.items() if there} == set(kept.split())
    total = sum(len(key) + len(value) for key, value in labels.attributes.items())
    total += (40 if parts["trace"] else 0) + (23 if parts["span"] else 0)
    assert total <= 128
    assert labels.attributes.get("gen_ai.response.id", response_id) == response_id
    assert labels.attributes.get("specdec.choice", choice) == choice
    assert labels.attributes.get("gen_ai.conversation.id", session) == session


@pytest.mark.parametrize(("runes", "kept"), [(14, True), (15, False), (32, False)])
def test_the_mark_of_the_lowest_accept_rate_is_the_first_to_go(runes: int, kept: bool) -> None:
    labels = labels_of(picked("x" * runes, "1", lowest_rate=0.25), SPAN, 1)
    assert labels.attributes.get("specdec.pick") == ("lowest" if kept else None)
    assert (labels.attributes["gen_ai.response.id"], labels.trace_id, labels.span_id) == ("x" * runes, 0xABC, 0xDEF)
    assert labels.attributes["specdec.choice"] == "1"
    assert labels.lowest_rate == 0.25  # it goes by that in a reservoir all the same
    assert "specdec.pick" not in labels_of(picked(), SPAN, 1).attributes


# --- Who is named -----------------------------------------------------------------------------------------------------


class Simulation:
    """Generations that are born and finish in rounds; a drain at the end of each."""

    def __init__(self) -> None:
        self.names: dict[int, object] = {}
        self.candidates: Candidates[Candidate] = Candidates(lambda lost: None)

    def born(self, name: object) -> Candidate | None:
        candidate = self.candidates.born(Candidate)
        if candidate is not None:
            self.names[id(candidate)] = name
            self.keep = [*getattr(self, "keep", []), candidate]
        return candidate

    def finish(self, candidate: Candidate | None) -> None:
        if candidate is not None and not candidate.evicted:
            self.candidates.finish(candidate, 1)

    def drain(self) -> list[object]:
        drained = [self.names[id(each)] for each in self.candidates.drain()[:PICKS]]
        return drained


def test_with_64_alive_and_4_finished_between_drains_each_is_picked() -> None:
    simulation = Simulation()
    alive = [(name, simulation.born(name)) for name in range(PLACES)]
    simulation.drain()
    for turn in range(200):
        finished = [alive.pop(random.randrange(len(alive))) for _ in range(PICKS)]
        for n in range(PICKS):  # others are born before the drain that frees the places
            simulation.finish(finished[n][1])
            name = PLACES + turn * PICKS + n
            alive.append((name, simulation.born(name)))
        assert sorted(map(str, simulation.drain())) == sorted(str(name) for name, _ in finished)


def test_a_burst_of_256_is_sampled_uniformly() -> None:
    # 4 of 256 in each of 2,000 bursts: each place is picked 31.25 times on the average, with a standard deviation of
    # 5.5.
    hits: Counter[object] = Counter()
    for _ in range(2_000):
        simulation = Simulation()
        for candidate in [simulation.born(name) for name in range(256)]:
            simulation.finish(candidate)
        hits.update(simulation.drain())
    assert sum(hits.values()) == 2_000 * PICKS
    quarters = [sum(hits[name] for name in range(start, start + 64)) for start in (0, 64, 128, 192)]
    # A quarter of the burst has 2,000 of the picks, with a standard deviation below 39: five of them on either side.
    assert all(abs(quarter - 2_000) < 5 * 39 for quarter in quarters), quarters


def test_long_generations_among_short_ones_are_as_likely_as_they_are_many() -> None:
    # 100 short ones (each finishes in its round) and 10 long ones (born here, finished 5 rounds later) a round.
    hits: Counter[object] = Counter()
    finished: Counter[object] = Counter()
    simulation = Simulation()
    waiting: list[list[Candidate | None]] = []
    for turn in range(3_000):
        shorts = [simulation.born("short") for _ in range(100)]
        waiting.append([simulation.born("long") for _ in range(10)])
        done = shorts + (waiting.pop(0) if len(waiting) > 5 else [])
        for candidate in done:
            simulation.finish(candidate)
        picks = simulation.drain()
        simulation.keep = []
        if turn > 20:
            hits.update(picks)
            finished.update({"short": 100, "long": 10})
    share = hits["long"] / sum(hits.values())
    # One in eleven is long: 9.1 %, of some 11,900 picks, so a standard deviation of 0.27 points.
    assert share == pytest.approx(10 / 110, abs=5 * 0.0027)


def candidates(*drafts: tuple[int, int] | None) -> list[tuple[Candidate, tuple[int, int] | None]]:
    return [(Candidate(n / 10), each) for n, each in enumerate(drafts)]


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([(8, 16), (9, 16), (3, 20), (8, 16), (0, 15), (5, 16)], [2, 0, 1, 3]),  # the third; 15 are too few
        ([(8, 16), (9, 16), (8, 16)], [0, 1, 2]),  # of two alike by chance; all are picked
        ([(0, 15), None, (1, 1), (0, 0), (2, 3)], [0, 1, 2, 3]),  # nobody to single out
        ([None, (16, 16)], [1, 0]),
        ([], []),
    ],
)
def test_one_place_goes_to_the_lowest_accept_rate_and_the_others_by_chance(
    drafts: list[tuple[int, int] | None], expected: list[int]
) -> None:
    finished = candidates(*drafts)
    known = dict(finished)
    chosen = choose([candidate for candidate, _ in finished], known.__getitem__)
    assert [int(candidate.order * 10) for candidate, _ in chosen] == expected
    rates = [rate for _, rate in chosen]
    assert all(rate is None for rate in rates[1:])
    if rates and rates[0] is not None:
        accepted, proposed = known[chosen[0][0]] or (0, 0)
        assert rates[0] == accepted / proposed
    else:
        assert not [each for each in drafts if each and each[1] >= 16]


# --- On the SDK -------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """An engine's tally that says what it was told to say."""

    taken: list[Taken] = field(default_factory=list)
    ended: bool = False

    def take(self) -> Taken:
        return self.taken.pop(0) if self.taken else Taken([])

    def finish(
        self,
        response_id: str,
        completion: int,
        order: float,
        ms: int,
        trace_ids: TraceIds | None = None,
        lowest_rate: float | None = None,
    ) -> None:
        increment = Increment(SpecCounts(1, 2, 1, completion, 2), 1)
        generation = Picked(response_id, ms * 1_000_000, order, [increment], trace=trace_ids, lowest_rate=lowest_rate)
        rest = Increment(SpecCounts(10, 20, 10, 100, 20), 5)
        self.taken.append(Taken([increment, rest], [generation]))


def attach(provider: MeterProvider) -> Tally:
    tally = Tally()
    pool = pool_for(provider)
    source = EngineSource(ENGINE, tally, "engine-0")
    pool.birth(source.expected())
    pool.attach(source)
    return tally


def provider_with(*readers: InMemoryMetricReader) -> MeterProvider:
    return MeterProvider(readers, views=views(), exemplar_filter=GenerationExemplarFilter(), shutdown_on_exit=False)


def collected(reader: InMemoryMetricReader, scope: str = "otel_specdec") -> dict[str, list[object]]:
    """The exemplars of each metric of a scope, over all points."""
    data = reader.get_metrics_data()
    return {
        metric.name: [exemplar for point in metric.data.data_points for exemplar in point.exemplars]
        for resource in (data.resource_metrics if data else ())
        for scope_metrics in resource.scope_metrics
        if scope_metrics.scope.name == scope
        for metric in scope_metrics.metrics
    }


def ids(exemplars: Sequence[object]) -> list[str]:
    return [e.filtered_attributes.get("gen_ai.response.id") for e in exemplars]  # type: ignore[attr-defined]


def value_of(reader: InMemoryMetricReader, name: str) -> int:
    data = reader.get_metrics_data()
    assert data is not None
    return sum(
        int(point.value)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    )


SIX = {
    "specdec.accepted_tokens": 1,
    "specdec.proposed_tokens": 2,
    "specdec.verify_steps": 1,
    "specdec.completion_tokens": 7,
    "specdec.emitted_tokens": 2,
    "specdec.generations": 1,
}


def test_a_generation_is_named_on_the_six_counters_with_its_own_counts() -> None:
    reader = InMemoryMetricReader()
    tally = attach(provider_with(reader))
    tally.finish("cmpl-1", 7, 0.3, 5_000, TraceIds(0xABC, 0xDEF, True))
    found = collected(reader)
    named = {name: exemplars for name, exemplars in found.items() if exemplars}
    assert {name: [e.value for e in exemplars] for name, exemplars in named.items()} == {  # type: ignore[attr-defined]
        name: [value] for name, value in SIX.items()
    }
    for (exemplar,) in named.values():
        assert exemplar.filtered_attributes == {"gen_ai.response.id": "cmpl-1"}  # type: ignore[attr-defined]
        assert (exemplar.trace_id, exemplar.span_id) == (0xABC, 0xDEF)  # type: ignore[attr-defined]
        assert exemplar.time_unix_nano == 5_000_000_000  # type: ignore[attr-defined]
    assert not any(collected(reader).values())  # nothing is left for the next collection
    assert value_of(reader, "specdec.completion_tokens") == 107  # the exemplar's share is part of the sum


def test_births_and_remainders_carry_none_even_inside_somebodys_span() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], exemplar_filter=AlwaysOnExemplarFilter(), views=views(), shutdown_on_exit=False)
    with TracerProvider().get_tracer("app").start_as_current_span("unrelated"):
        tally = attach(provider)
        assert not any(collected(reader).values())
        tally.finish("cmpl-1", 7, 0.3, 5_000)
        found = collected(reader)
    assert {ids(exemplars)[0] for exemplars in found.values() if exemplars} == {"cmpl-1"}
    assert all(len(exemplars) <= 1 for exemplars in found.values())
    assert all(e.trace_id is None for exemplars in found.values() for e in exemplars)  # type: ignore[attr-defined]


def test_without_our_view_a_collection_inside_a_span_leaves_no_foreign_trace_id() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], exemplar_filter=AlwaysOnExemplarFilter(), shutdown_on_exit=False)
    with TracerProvider().get_tracer("app").start_as_current_span("unrelated") as span:
        tally = attach(provider)
        tally.finish("cmpl-1", 7, 0.3, 5_000, TraceIds(0xABC, 0xDEF, True))
        found = collected(reader)
        foreign = span.get_span_context().trace_id
    traces = {e.trace_id for exemplars in found.values() for e in exemplars}  # type: ignore[attr-defined]
    assert foreign not in traces
    # No id leaks where no view of ours is installed.
    assert all("gen_ai.response.id" not in (e.filtered_attributes or {}) for x in found.values() for e in x)  # type: ignore[attr-defined]


def test_no_stale_trace_id() -> None:
    reader = InMemoryMetricReader()
    tally = attach(provider_with(reader))
    tally.finish("with", 7, 0.3, 5_000, TraceIds(0xABC, 0xDEF, True))
    collected(reader)
    tally.finish("without", 7, 0.3, 6_000)
    (exemplar,) = collected(reader)["specdec.generations"]
    assert exemplar.trace_id is None  # type: ignore[attr-defined]


def test_two_readers_of_either_temporality_see_the_same_generations_over_their_own_spans() -> None:
    cumulative = InMemoryMetricReader()
    delta = InMemoryMetricReader(preferred_temporality={SdkCounter: AggregationTemporality.DELTA})
    tally = attach(provider_with(cumulative, delta))
    generations = [(f"cmpl-{n}", random.random()) for n in range(9)]
    seen = []
    for n, (name, order) in enumerate(generations):  # one reader collects nine times, the other once
        tally.finish(name, 7, order, 1_000 + n)
        seen += ids(collected(cumulative)["specdec.generations"])
    assert seen == [name for name, _ in generations]
    found = collected(delta)
    lowest = {name for name, _ in sorted(generations, key=lambda g: g[1])[:PICKS]}
    for name in SIX:
        assert set(ids(found[name])) == lowest, name  # the same ones on each counter
    times = [e.time_unix_nano for e in found["specdec.generations"]]  # type: ignore[attr-defined]
    assert times == sorted(times)


def test_a_reservoir_keeps_the_lowest_accept_rate_and_three_by_chance() -> None:
    cumulative = InMemoryMetricReader()
    delta = InMemoryMetricReader(preferred_temporality={SdkCounter: AggregationTemporality.DELTA})
    tally = attach(provider_with(cumulative, delta))
    for n in range(6):  # one reader collects twelve times, the other once
        tally.finish(f"marked-{n}", 7, 0.9, 2_000 + 10 * n, lowest_rate=(n + 2) % 6 / 10)
        tally.finish(f"other-{n}", 7, n / 10, 2_001 + 10 * n)
        assert ids(collected(cumulative)["specdec.generations"]) == [f"marked-{n}"]
        assert ids(collected(cumulative)["specdec.generations"]) == [f"other-{n}"]
    found = collected(delta)
    for name in SIX:
        assert set(ids(found[name])) == {"marked-4", "other-0", "other-1", "other-2"}, name
    exemplars: list[Any] = found["specdec.generations"]
    picks = {e.filtered_attributes["gen_ai.response.id"]: e.filtered_attributes.get("specdec.pick") for e in exemplars}
    assert picks == {"marked-4": "lowest", "other-0": None, "other-1": None, "other-2": None}


def test_where_there_is_room_each_marked_one_is_kept() -> None:
    cumulative = InMemoryMetricReader()
    delta = InMemoryMetricReader(preferred_temporality={SdkCounter: AggregationTemporality.DELTA})
    tally = attach(provider_with(cumulative, delta))
    for n in range(3):
        tally.finish(f"marked-{n}", 7, 0.9, 2_000 + n, lowest_rate=n / 10)
        collected(cumulative)
    assert ids(collected(delta)["specdec.generations"]) == ["marked-0", "marked-1", "marked-2"]


def test_times_are_distinct_ascending_milliseconds() -> None:
    reader = InMemoryMetricReader()
    tally = attach(provider_with(reader))
    for n in range(4):
        tally.finish(f"cmpl-{n}", 7, n / 10, 5_000)  # all in one millisecond
    times = []
    for _ in range(4):
        times += [e.time_unix_nano for e in collected(reader)["specdec.generations"]]  # type: ignore[attr-defined]
    assert [time // 1_000_000 for time in times] == [5_000, 5_001, 5_002, 5_003]


def test_always_off_is_obeyed() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], exemplar_filter=AlwaysOffExemplarFilter(), shutdown_on_exit=False)
    assert install(provider, {"OTEL_METRICS_EXEMPLAR_FILTER": "always_off"})
    tally = attach(provider)
    tally.finish("cmpl-1", 7, 0.3, 5_000, TraceIds(0xABC, 0xDEF, True))
    assert not any(collected(reader).values())
    assert value_of(reader, "specdec.completion_tokens") == 107


def test_an_explicit_trace_based_shows_sampled_traces_only() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    assert install(provider, {"OTEL_METRICS_EXEMPLAR_FILTER": "trace_based"})
    tally = attach(provider)
    tally.finish("unsampled", 7, 0.3, 5_000, TraceIds(0xABC, 0xDEF, False))
    assert not any(collected(reader).values())
    tally.finish("sampled", 7, 0.3, 6_000, TraceIds(0xABC, 0xDEF, True))
    assert ids(collected(reader)["specdec.generations"]) == ["sampled"]


@pytest.mark.parametrize("environ", [{}, {"OTEL_METRICS_EXEMPLAR_FILTER": "always_on"}], ids=["unset", "always_on"])
def test_installed_for_a_provider_that_takes_no_views(environ: dict[str, str]) -> None:
    reader = InMemoryMetricReader()
    base = AlwaysOnExemplarFilter() if environ else None
    provider = MeterProvider([reader], exemplar_filter=base, shutdown_on_exit=False)
    assert install(provider, environ)
    assert install(provider, environ)  # twice is once
    tally = attach(provider)
    tally.finish("cmpl-1", 7, 0.3, 5_000)
    assert ids(collected(reader)["specdec.generations"]) == ["cmpl-1"]
    assert value_of(reader, "specdec.generations") == 6  # one stream: not doubled


def test_other_meters_exemplars_are_what_they_were() -> None:
    def app_exemplars(provider: MeterProvider, reader: InMemoryMetricReader) -> list[tuple[object, ...]]:
        counter = provider.get_meter("app").create_counter("c")
        counter.add(1)
        with TracerProvider().get_tracer("app").start_as_current_span("s"):
            counter.add(2, {"k": "v"})
        found = collected(reader, "app")["c"]
        return [(e.value, e.filtered_attributes) for e in found]  # type: ignore[attr-defined]

    plain_reader, our_reader = InMemoryMetricReader(), InMemoryMetricReader()
    plain = app_exemplars(MeterProvider([plain_reader], shutdown_on_exit=False), plain_reader)
    assert plain  # the default filter shows sampled spans
    assert app_exemplars(provider_with(our_reader), our_reader) == plain


def test_a_wildcard_view_beside_ours_doubles_sums_as_the_docs_say() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(
        [reader],
        views=[*views(), View(instrument_name="*", attribute_keys={"gen_ai.request.model"})],
        shutdown_on_exit=False,
    )
    tally = attach(provider)
    tally.finish("cmpl-1", 7, 0.3, 5_000)
    assert value_of(reader, "specdec.completion_tokens") == 2 * 107
    assert "add them up" in (views.__doc__ or "")


def test_the_private_names_that_install_touches_are_there() -> None:
    provider = MeterProvider(shutdown_on_exit=False)
    for path in PRIVATE_NAMES:
        value: object = provider
        for name in path.split("."):
            value = getattr(value, name)


def test_an_unknown_sdk_gets_one_warning_and_traces_only(caplog: pytest.LogCaptureFixture) -> None:
    class Strange:
        _sdk_config = object()

    assert not install(Strange(), {})
    assert len(caplog.records) == 1
    assert "will not name generations" in caplog.text
