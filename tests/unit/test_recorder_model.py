"""Recorders against a slow model of the contract, for any reports in any order.

The model keeps every report that was counted and works everything out from them anew; it shares no code with the
package but the report itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from tests.unit.collected import ACCEPTED_AT, PROPOSED_AT, Meter

FIELDS = ("accepted", "proposed", "verify", "completion", "emitted")
RATIOS = {
    "accept_rate": ("accepted", "proposed"),
    "acceptance_length": ("emitted", "verify"),
    "tokens_per_verify": ("completion", "verify"),
}
Known = dict[str, "int | None"]


@dataclass
class Generation:
    """What one identity has told, as far as it was counted."""

    counted: list[Known] = field(default_factory=lambda: [dict.fromkeys(FIELDS, 0)])
    reported: set[str] = field(default_factory=set)
    final: Known | None = None
    ratios: set[str] = field(default_factory=lambda: set(RATIOS))
    positions: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def last(self, name: str) -> int:
        return [counts[name] for counts in self.counted if counts[name] is not None][-1] or 0


@dataclass
class Model:
    """The contract's sections "Exactly once" and "Ratios", rule by rule."""

    speculation: bool | None
    generations: dict[tuple[str | None, str], Generation] = field(default_factory=dict)
    sums: Counter[tuple[str, str]] = field(default_factory=Counter)
    positions: Counter[tuple[str, int]] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def record(self, report: GenerationReport) -> None:
        # Speculation off: not one point.
        if self.speculation is False:
            return
        told: Known = {name: getattr(report.counts, name) for name in FIELDS}
        generation = self.generations.setdefault((report.session_id, report.generation_id), Generation())
        if generation.final is not None:
            self._after_the_finish(generation, told, report.finished)
            return
        # A generation of which nothing about drafts is known adds nothing, unless speculation is known to be on.
        knows_drafts = any(told[name] is not None for name in ("accepted", "proposed", "verify"))
        if len(generation.counted) == 1 and not knows_drafts and self.speculation is None:
            return
        changes = [value - generation.last(name) for name, value in told.items() if value is not None]
        if not report.finished and not any(change > 0 for change in changes):
            return  # late
        if any(change < 0 for change in changes):
            self.dropped["conflict"] += 1
            return
        # A request that ended before any token was generated is no generation and adds nothing.
        if told["completion"] == 0:
            return
        self._count(generation, told)
        self._count_positions(generation, report)
        if report.finished:
            generation.final = told
            self.sums["generations", named(generation.ratios)] += 1

    def _after_the_finish(self, generation: Generation, told: Known, finished: bool) -> None:
        if finished:
            self.dropped["duplicate" if told == generation.final else "conflict"] += 1
        elif any(
            value > generation.last(name)
            for name, value in told.items()
            if value is not None and name in generation.reported
        ):
            self.dropped["conflict"] += 1

    def _count(self, generation: Generation, told: Known) -> None:
        change = {name: value - generation.last(name) for name, value in told.items() if value is not None}
        # A half counts where it was known at both ends of the increment.
        both_ends = {name: value for name, value in change.items() if generation.counted[-1][name] is not None}
        holding = {
            ratio for ratio, halves in RATIOS.items() if both_ends.keys() >= set(halves) and holds(ratio, both_ends)
        }
        for name, value in change.items():
            self.sums[name, named({ratio for ratio in holding if name in RATIOS[ratio]})] += value
        generation.ratios &= holding
        generation.counted.append(told)
        generation.reported |= change.keys()

    def _count_positions(self, generation: Generation, report: GenerationReport) -> None:
        if report.accepted_by_position is None or report.proposed_by_position is None:
            return
        now = (tuple(report.accepted_by_position), tuple(report.proposed_by_position))
        length = len(now[0])
        before = tuple(half + (0,) * (length - len(half)) for half in generation.positions)
        if len(now[1]) != length or len(before[0]) != length:
            return
        changes = [tuple(map(operator.sub, *halves)) for halves in zip(now, before, strict=True)]
        if all(0 <= accepted <= proposed for accepted, proposed in zip(*changes, strict=True)):
            generation.positions = now
            for name, half in zip((ACCEPTED_AT, PROPOSED_AT), changes, strict=True):
                for position, value in enumerate(half):
                    self.positions[name, position] += value


def holds(ratio: str, change: dict[str, int]) -> bool:
    if ratio == "accept_rate":
        return change["accepted"] <= change["proposed"]
    if ratio == "acceptance_length":
        by_steps = change["accepted"] + change["verify"] if "accepted" in change else math.inf
        return change["emitted"] <= min(by_steps, change.get("completion", math.inf))
    return True


def named(ratios: set[str]) -> str:
    return ",".join(sorted(ratios)) or "none"


small = st.none() | st.integers(0, 6)
lists = st.none() | st.lists(st.integers(0, 3), max_size=3)
identities = st.sampled_from([(None, "g"), ("s", "g"), ("s", "h")])
anything = st.builds(
    lambda identity, counts, finished, accepted, proposed: GenerationReport(
        identity[1],
        SpecCounts(*counts),
        session_id=identity[0],
        finished=finished,
        accepted_by_position=accepted,
        proposed_by_position=proposed,
    ),
    identities,
    st.tuples(small, small, small, small, small),
    st.booleans(),
    lists,
    lists,
)


steps = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2))


def counts_of(step: tuple[int, int, int]) -> tuple[int, ...]:
    accepted, rejected, without_drafts = step
    return (accepted, accepted + rejected, 1, accepted + 1 + without_drafts, accepted + 1)


@st.composite
def lives(draw: st.DrawFn) -> list[GenerationReport]:
    """What engines report: ever growing counts with some of them unknown now and then, in any order, some repeated."""
    reports: list[GenerationReport] = []
    for session, generation in draw(st.lists(identities, min_size=1, max_size=3, unique=True)):
        life = draw(st.lists(steps, min_size=1, max_size=5))
        sums = [0] * 5
        for number, step in enumerate(map(counts_of, life), start=1):
            sums = list(map(operator.add, sums, step))
            known = draw(st.tuples(*[st.sampled_from([True, True, True, False])] * 5))
            reports.append(
                GenerationReport(
                    generation,
                    SpecCounts(*(value if is_known else None for value, is_known in zip(sums, known, strict=True))),
                    session_id=session,
                    finished=number == len(life),
                )
            )
    if draw(st.booleans()):
        reports = draw(st.permutations(reports))
    return reports + draw(st.lists(st.sampled_from(reports), max_size=3))


@given(
    reports=st.lists(anything, max_size=12) | lives(),
    speculation=st.sampled_from([None, True, False]),
    every=st.integers(1, 4),
)
def test_any_reports_in_any_order_come_out_as_the_contract_says(
    reports: list[GenerationReport], speculation: bool | None, every: int
) -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=speculation)
    model = Model(speculation)
    seen: dict[tuple[str, frozenset[tuple[str, Any]]], int] = {}
    for number, report in enumerate(reports):
        recorder.record(report)
        model.record(report)
        if number % every == 0:
            now = {point.series: point.value for point in meter.points()}
            assert now.keys() >= seen.keys()
            assert all(now[series] >= value for series, value in seen.items()), "a counter went down"
            seen = now
    assert meter.sets() == dict(model.sums)
    assert meter.dropped() == dict(model.dropped)
    at_positions = {
        (point.name, point.attributes["specdec.position"]): point.value
        for point in meter.points(ACCEPTED_AT, PROPOSED_AT)
    }
    assert at_positions == dict(model.positions)
    if model.sums:
        pooled = meter.pooled()
        assert 0 <= pooled.ratios.get("accept_rate", 0) <= 1
        assert all(0 <= rate <= 1 for rate in pooled.accept_rate_by_position.values())
        assert all(0 <= share <= 1 for share in pooled.coverage.values())
        assert all(ratio >= 0 for ratio in pooled.ratios.values())


@given(st.lists(steps, min_size=1, max_size=6), st.data())
def test_however_a_life_is_told_its_sums_are_those_of_its_final_report(
    life: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    so_far = list(map(SpecCounts, *map(itertools.accumulate, zip(*map(counts_of, life), strict=True))))
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for counts in data.draw(st.lists(st.sampled_from(so_far))):
        recorder.record(GenerationReport("g", counts, finished=False))
    recorder.record(GenerationReport("g", so_far[-1]))
    assert meter.totals() == dataclasses.asdict(so_far[-1]) | {"generations": 1}
    assert meter.dropped() == {}
