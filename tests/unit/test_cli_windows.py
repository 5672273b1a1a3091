"""Sums over windows, of whatever comes: cumulative and delta, late and twice, across restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_specdec import names
from otel_specdec.cli import windows as module
from otel_specdec.cli.windows import LATEST, SINCE_START, Group, Named, Observation, Windows
from otel_specdec.names import Metric

BEGAN = 1_000_000
"""Seconds since the epoch at which the watch begins."""
MODEL: Mapping[str, object] = {
    names.SOURCE: "engine",
    names.PROVIDER: "vllm",
    names.MODEL: "m",
    names.METHOD: "eagle",
    names.RATIO_SET: "acceptance_length",
}


class Watch:
    """Windows with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = float(BEGAN)
        self.windows = Windows(lambda: self.now)

    def sees(self, value: int, *, at: float, start: float = BEGAN - 100, sampled: bool = False, **more: Any) -> None:
        self.windows.observe([observation(value, at, start, **more)], sampled=sampled)

    def completion(self, window: str) -> int | None:
        (group,) = self.windows.groups()
        return group.windows[window].totals.get("completion")


def observation(
    value: int,
    at: float,
    start: float = BEGAN - 100,
    *,
    metric: Metric = Metric.COMPLETION,
    series: object = "s",
    delta: bool = False,
    attributes: Mapping[str, object] | None = None,
) -> Observation:
    return Observation(
        metric, (metric, series), {**MODEL, **(attributes or {})}, value, int(start * 1e9), int(at * 1e9), delta
    )


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_what_came_before_the_watch_is_only_in_the_sum_since_the_start(watch: Watch) -> None:
    watch.sees(100, at=BEGAN)
    assert watch.completion(SINCE_START) == 100
    assert watch.completion("1 min") is None


def test_what_comes_while_it_watches_is_in_every_window(watch: Watch) -> None:
    watch.sees(100, at=BEGAN)
    watch.sees(107, at=BEGAN + 10)
    assert [watch.completion(window) for window in ("1 min", "5 min", SINCE_START)] == [7, 7, 107]


def test_a_series_that_is_born_while_it_watches_counts_from_its_birth(watch: Watch) -> None:
    watch.sees(5, at=BEGAN + 2, start=BEGAN + 1)
    assert watch.completion("1 min") == 5


def test_a_window_forgets(watch: Watch) -> None:
    watch.sees(0, at=BEGAN)
    watch.sees(10, at=BEGAN + 1)
    watch.now += 61
    watch.sees(13, at=BEGAN + 61)
    assert [watch.completion(window) for window in ("1 min", "5 min", SINCE_START)] == [3, 13, 13]
    watch.now += 301
    assert [watch.completion(window) for window in ("1 min", "5 min", SINCE_START)] == [None, None, 13]


def test_a_restart_under_the_same_identity_is_never_negative(watch: Watch) -> None:
    watch.sees(100, at=BEGAN)
    watch.sees(110, at=BEGAN + 1)
    watch.sees(4, at=BEGAN + 3, start=BEGAN + 2)
    watch.sees(9, at=BEGAN + 4, start=BEGAN + 2)
    assert watch.completion("1 min") == 10 + 9
    assert watch.completion(SINCE_START) == 119


def test_a_restart_that_has_gone_beyond_the_old_value_is_seen_by_its_start(watch: Watch) -> None:
    watch.sees(10, at=BEGAN)
    watch.sees(50, at=BEGAN + 9, start=BEGAN + 2)
    assert watch.completion("1 min") == 50


def test_a_value_that_falls_without_a_start_time_is_a_restart(watch: Watch) -> None:
    watch.sees(100, at=BEGAN, start=0)
    watch.sees(3, at=BEGAN + 1, start=0)
    assert watch.completion("1 min") == 3


def test_repeats_late_values_and_values_of_an_earlier_life_add_nothing(watch: Watch) -> None:
    watch.sees(10, at=BEGAN + 5)
    watch.sees(10, at=BEGAN + 5)
    watch.sees(8, at=BEGAN + 4)
    watch.sees(2, at=BEGAN + 7, start=BEGAN + 6)
    watch.sees(12, at=BEGAN + 8)
    assert watch.completion(SINCE_START) == 12


def test_deltas_are_added_up_and_a_repeat_is_not(watch: Watch) -> None:
    watch.sees(10, at=BEGAN + 1, delta=True)
    watch.sees(10, at=BEGAN + 1, delta=True)
    watch.sees(5, at=BEGAN + 2, delta=True)
    assert [watch.completion(window) for window in ("1 min", SINCE_START)] == [15, 15]


def test_samples_of_the_past_fall_into_the_window_of_their_time(watch: Watch) -> None:
    for seconds, value in ((-400, 100), (-200, 110), (-30, 113), (0, 114)):
        watch.sees(value, at=BEGAN + seconds, start=0, sampled=True)
    assert [watch.completion(window) for window in ("1 min", "5 min", SINCE_START)] == [4, 14, 114]


def test_groups_are_split_by_source_model_and_method_and_nothing_else(watch: Watch) -> None:
    watch.windows.observe(
        [
            observation(1, BEGAN, series="a"),
            observation(2, BEGAN, series="b", attributes={names.PROCESS: "engine-1"}),
            observation(4, BEGAN, series="c", attributes={names.SOURCE: "response"}),
            observation(8, BEGAN, series="d", attributes={names.MODEL: "n"}),
            observation(16, BEGAN, series="e", attributes={names.METHOD: "ngram"}),
        ]
    )
    found = {
        (group.attributes[names.SOURCE], group.attributes[names.MODEL], group.attributes[names.METHOD]): group
        for group in watch.windows.groups()
    }
    totals = {key: group.windows[SINCE_START].totals["completion"] for key, group in found.items()}
    assert totals == {
        ("engine", "m", "eagle"): 3,
        ("response", "m", "eagle"): 4,
        ("engine", "n", "eagle"): 8,
        ("engine", "m", "ngram"): 16,
    }


def pooled_group(watch: Watch) -> Group:
    (group,) = watch.windows.groups()
    return group


def test_ratios_coverage_positions_and_every_smaller_k(watch: Watch) -> None:
    both = "acceptance_length,tokens_per_verify"
    values: list[tuple[Metric, int, dict[str, object]]] = [
        (Metric.EMITTED, 30, {names.RATIO_SET: "acceptance_length"}),
        (Metric.EMITTED, 99, {names.RATIO_SET: "none"}),
        (Metric.VERIFY, 10, {names.RATIO_SET: both}),
        (Metric.COMPLETION, 40, {names.RATIO_SET: "tokens_per_verify"}),
        (Metric.GENERATIONS, 3, {names.RATIO_SET: both}),
        (Metric.GENERATIONS, 1, {names.RATIO_SET: "none"}),
    ]
    for position, (accepted, proposed) in enumerate(((9, 10), (6, 8), (0, 0))):
        values.append((Metric.POSITION_ACCEPTED, accepted, {names.POSITION: str(position)}))
        values.append((Metric.POSITION_PROPOSED, proposed, {names.POSITION: position}))
    watch.windows.observe(
        observation(value, BEGAN, metric=metric, series=tuple(more.items()), attributes=more)
        for metric, value, more in values
    )
    pooled = pooled_group(watch).windows[SINCE_START]
    assert pooled.ratios == {"acceptance_length": 3.0, "tokens_per_verify": 4.0}
    assert pooled.coverage == {"acceptance_length": 0.75, "accept_rate": 0, "tokens_per_verify": 0.75}
    assert pooled.accept_rate_by_position == {0: 0.9, 1: 0.75}
    assert pooled.acceptance_length_by_k == {1: 1.9, 2: 2.5}  # 1 + 9/10, 1 + 15/10; three were never proposed


def test_errors_and_dropped_reports_are_no_group(watch: Watch) -> None:
    watch.windows.observe(
        [
            Observation(Metric.ERRORS, "e", {names.ERROR_TYPE: "KeyError"}, 2, 0, 1),
            Observation(Metric.DROPPED_REPORTS, "d", {names.REASON: "conflict"}, 3, 0, 1),
        ]
    )
    assert watch.windows.groups() == []
    assert (watch.windows.errors, watch.windows.dropped) == ({"KeyError": 2}, {"conflict": 3})


def named(number: int, metric: Metric, value: int, series: object = "s") -> Named:
    return Named(metric, (metric, series), MODEL, f"cmpl-{number}", "", "", number, value)


def test_a_generation_is_put_together_from_the_exemplars_on_its_counters(watch: Watch) -> None:
    watch.sees(1, at=BEGAN)
    for _ in range(2):  # a Prometheus tells of the same one again
        watch.windows.observe(
            [], [named(1, Metric.EMITTED, 6, "a"), named(1, Metric.EMITTED, 1, "b"), named(1, Metric.VERIFY, 2)]
        )
    (generation,) = pooled_group(watch).latest
    assert generation.counts == {"emitted": 7, "verify": 2}


def test_the_newest_generations_are_kept_and_no_more(watch: Watch) -> None:
    watch.sees(1, at=BEGAN)
    numbers = [*range(20, 0, -1), *range(21, 31)]
    for number in numbers:
        watch.windows.observe([], [named(number, Metric.VERIFY, number)])
    assert [each.time_ms for each in pooled_group(watch).latest] == list(range(30, 30 - LATEST, -1))


def test_everything_is_bounded(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 3)
    monkeypatch.setattr(module, "MAX_GROUPS", 2)
    for number in range(3):
        watch.sees(1, at=BEGAN, series=number, attributes={names.MODEL: str(number)})
    watch.sees(1, at=BEGAN, series="more")
    watch.sees(1, at=BEGAN, series="more still")
    assert len(watch.windows.groups()) == 2
    assert watch.windows.refused >= 2
    assert len(watch.windows._last) <= 3
    for second in range(1_000):
        watch.now += 1
        watch.sees(second + 2, at=watch.now, series=0, attributes={names.MODEL: "0"})
        watch.windows.groups()
    assert all(len(sums.seconds) <= 302 for sums in watch.windows._groups.values())


steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.booleans(), st.booleans()), max_size=60)


@given(steps, st.booleans())
def test_a_fleet_with_restarts_is_counted_to_the_token(fleet: list[tuple[int, int, bool, bool]], deltas: bool) -> None:
    """Engines add tokens, restart now and then, and export, perhaps twice."""
    watch = Watch()
    value, start, sent, at = [0, 0, 0], [float(BEGAN)] * 3, 0, float(BEGAN)
    for engine, tokens, restart, twice in fleet:
        at += 1
        if restart:
            value[engine], start[engine] = 0, at
            at += 1
        value[engine] += tokens
        sent += tokens
        for _ in range(1 + twice):
            told = tokens if deltas else value[engine]
            watch.sees(told, at=at, start=start[engine], series=engine, delta=deltas)
    total = watch.windows.groups()[0].windows if fleet else {}
    for pooled in total.values():
        assert pooled.totals["completion"] == sent
