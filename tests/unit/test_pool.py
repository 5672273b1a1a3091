from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider

from otel_specdec import GenerationReport, Pooled, SpecCounts, SpecDecRecorder, pool
from otel_specdec.names import Metric
from otel_specdec.sums import Series, pool_for
from tests.unit.collected import Meter, in_memory_reader
from tests.unit.test_sums import engine_of


@pytest.fixture
def meter() -> Meter:
    return Meter()


def record(meter: Meter, generation: str, *counts: int | None, **fields: Any) -> None:
    SpecDecRecorder(meter.provider, speculation=True).record(
        GenerationReport(generation, SpecCounts(*counts), **fields)
    )


def pooled(meter: Meter, *by: str) -> list[Pooled]:
    return pool(meter.reader.get_metrics_data(), by)


def test_nothing_collected_gives_no_group(meter: Meter) -> None:
    assert pool(None) == []
    assert pooled(meter) == []


def test_ratios_are_quotients_of_sums_and_not_means_of_ratios(meter: Meter) -> None:
    record(meter, "short", 1, 2, 1, 10, 2)
    record(meter, "long", 900, 3_000, 1_000, 4_000, 1_900)
    (group,) = pooled(meter)
    assert group.totals == {"accepted": 901, "proposed": 3_002, "verify": 1_001, "completion": 4_010, "emitted": 1_902}
    assert group.generations == 2
    assert group.ratios == {
        "acceptance_length": 1_902 / 1_001,
        "accept_rate": 901 / 3_002,
        "tokens_per_verify": 4_010 / 1_001,
    }
    assert list(group.ratios) == ["acceptance_length", "accept_rate", "tokens_per_verify"]


def test_only_points_that_may_enter_a_ratio_enter_it_and_totals_hold_all(meter: Meter) -> None:
    record(meter, "whole", 1, 4, 1, 2, 2)
    record(meter, "unknown half", 3, None, 2, None, 5)
    record(meter, "inconsistent", 9, 8, 1, 10, 9)
    (group,) = pooled(meter)
    assert group.totals == {"accepted": 13, "proposed": 12, "verify": 4, "completion": 12, "emitted": 16}
    assert group.ratios == {"acceptance_length": 16 / 4, "accept_rate": 1 / 4, "tokens_per_verify": 12 / 2}
    assert group.coverage == {"acceptance_length": 1.0, "accept_rate": 1 / 3, "tokens_per_verify": 2 / 3}


def test_a_ratio_that_does_not_exist_is_absent(meter: Meter) -> None:
    record(meter, "g", None, None, None, 7)
    (group,) = pooled(meter)
    assert group.ratios == {}
    assert group.coverage == {"acceptance_length": 0.0, "accept_rate": 0.0, "tokens_per_verify": 0.0}
    assert group.totals == {"completion": 7}


def test_coverage_needs_a_finished_generation(meter: Meter) -> None:
    record(meter, "g", 1, 2, 1, 2, 2, finished=False)
    (group,) = pooled(meter)
    assert group.coverage == {}
    assert group.generations == 0
    assert group.ratios["accept_rate"] == 0.5


def test_an_engine_and_a_recorder_are_never_summed(meter: Meter) -> None:
    engine_of(meter.provider).put(1, 2, 1, 2, 2, generations=1)
    record(meter, "g", 1, 2, 1, 2, 2)
    groups = pooled(meter)
    assert [group.attributes["specdec.source"] for group in groups] == ["engine", "response"]
    assert [group.generations for group in groups] == [1, 1]


def test_groups_are_made_by_point_attributes(meter: Meter) -> None:
    record(meter, "g", 1, 2, model="b", engine_index=1)
    record(meter, "h", 2, 2, model="a", engine_index=0)
    record(meter, "i", 0, 4, model="a", engine_index=1)
    by_model = pooled(meter, "gen_ai.request.model")
    assert [(group.attributes["gen_ai.request.model"], group.ratios["accept_rate"]) for group in by_model] == [
        ("a", 2 / 6),
        ("b", 1 / 2),
    ]
    by_both = pooled(meter, "gen_ai.request.model", "specdec.engine.index")
    assert [tuple(group.attributes.values()) for group in by_both] == [
        ("response", "a", 0),
        ("response", "a", 1),
        ("response", "b", 1),
    ]
    assert len(pooled(meter, "specdec.source")) == 1


def test_one_name_may_stand_alone(meter: Meter) -> None:
    record(meter, "g", 1, 2, model="a")
    record(meter, "h", 1, 2, model="b")
    assert len(pool(meter.reader.get_metrics_data(), by="gen_ai.request.model")) == 2


def test_groups_are_made_by_resource_attributes_too() -> None:
    meter = Meter(resource={"service.name": "rollout"})
    record(meter, "g", 1, 2)
    (group,) = pooled(meter, "service.name", "no.such.attribute")
    assert group.attributes == {"specdec.source": "response", "service.name": "rollout"}


def test_positions_are_pooled_by_position(meter: Meter) -> None:
    for generation in "gh":
        record(meter, generation, None, None, 4, accepted_by_position=[3, 1, 0, 0], proposed_by_position=[4, 4, 1, 0])
    (group,) = pooled(meter)
    assert group.accept_rate_by_position == {0: 6 / 8, 1: 2 / 8, 2: 0.0}


def test_what_is_not_a_counter_of_ours_is_left_alone() -> None:
    reader = in_memory_reader(delta=False)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    meter = provider.get_meter("somebody")
    meter.create_histogram("latency").record(1.5)
    meter.create_counter("specdec.accepted_tokens_of_somebody").add(5)
    assert pool(reader.get_metrics_data()) == []


def test_dropped_reports_and_errors_are_no_generation(meter: Meter) -> None:
    pool_for(meter.provider).error(ValueError(), "testing")
    SpecDecRecorder(meter.provider).record(None)  # type: ignore[arg-type]  # the point of the test
    assert pooled(meter) == []


def test_a_delta_collection_pools_what_came_since_the_last_one() -> None:
    meter = Meter(delta=True)
    record(meter, "g", 1, 2)
    assert pooled(meter)[0].totals == {"accepted": 1, "proposed": 2}
    record(meter, "h", 10, 20)
    by_totals = [group.totals for group in pooled(meter)]
    assert {"accepted": 10, "proposed": 20} in by_totals


def test_what_overflowed_is_in_a_group_of_its_own_and_enters_no_ratio(meter: Meter) -> None:
    pool_for(meter.provider).add(
        [(Series(metric, (("otel.metric.overflow", True),)), 5) for metric in (Metric.ACCEPTED, Metric.PROPOSED)]
    )
    (group,) = pooled(meter)
    assert group.attributes == {}
    assert group.totals == {"accepted": 5, "proposed": 5}
    assert group.ratios == {}


def test_the_largest_sums_pool_without_loss(meter: Meter) -> None:
    record(meter, "g", 2**62, 2**62)
    (group,) = pooled(meter)
    assert group.totals["accepted"] == 2**62
    assert group.ratios["accept_rate"] == 1.0
