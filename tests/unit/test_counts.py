from __future__ import annotations

import copy
import dataclasses
import pickle
from enum import IntEnum
from typing import Any

import pytest
from opentelemetry import context

from otel_specdec import GenerationReport, SpecCounts
from otel_specdec.counts import COUNT_FIELDS, ratios_holding

FIELDS = ("accepted", "proposed", "verify", "completion", "emitted")


class Indexed:
    """An integer that is no `int`, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Named(IntEnum):
    THREE = 3


INTEGERS: list[tuple[Any, int]] = [(Indexed(3), 3), (Named.THREE, 3)]
try:
    import numpy as np  # type: ignore[import-not-found, unused-ignore]  # only some environments have it

    INTEGERS += [(np.int64(3), 3), (np.uint8(3), 3)]
except ImportError:
    pass


def test_the_fields_are_those_of_the_contract() -> None:
    assert COUNT_FIELDS == FIELDS
    assert SpecCounts(1, 2, 3, 4, 5) == SpecCounts(accepted=1, proposed=2, verify=3, completion=4, emitted=5)


def test_what_is_not_given_is_unknown() -> None:
    assert dataclasses.astuple(SpecCounts()) == (None,) * 5


def test_unknown_is_not_zero() -> None:
    assert SpecCounts(accepted=0) != SpecCounts()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [True, False, 1.0, float("nan"), float("inf"), "1", b"1", [1], (), object(), 1j])
def test_a_count_is_an_integer_or_none(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"SpecCounts\.{field} must be an integer or None"):
        SpecCounts(**{field: value})  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [-1, 2**63, 10**5000, -(10**5000), Indexed(-1), Indexed(2**63)], ids=type)
def test_a_count_lies_in_the_range_of_otlp(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SpecCounts\.{field} must lie in 0"):
        SpecCounts(**{field: value})


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_the_ends_of_the_range_are_counts(value: int) -> None:
    assert dataclasses.astuple(SpecCounts(*[value] * 5)) == (value,) * 5


@pytest.mark.parametrize(("value", "number"), INTEGERS)
def test_any_integer_becomes_an_int(value: Any, number: int) -> None:
    accepted = SpecCounts(accepted=value).accepted
    assert accepted == number
    assert type(accepted) is int


def test_counts_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpecCounts().accepted = 1  # type: ignore[misc]  # the point of the test


def test_counts_can_be_copied_pickled_and_put_into_sets() -> None:
    counts = SpecCounts(1, None, 0, 4)
    assert copy.deepcopy(counts) == counts == pickle.loads(pickle.dumps(counts))
    assert len({counts, SpecCounts(1, None, 0, 4), SpecCounts(1, 0, 0, 4)}) == 2


@pytest.mark.parametrize(
    ("counts", "known"),
    [
        (SpecCounts(), False),
        (SpecCounts(completion=7), False),
        (SpecCounts(emitted=7, completion=7), False),
        (SpecCounts(accepted=0), True),
        (SpecCounts(proposed=0), True),
        (SpecCounts(verify=0), True),
    ],
)
def test_completion_alone_says_nothing_of_drafts(counts: SpecCounts, known: bool) -> None:
    assert counts.knows_drafts is known


ALL = {"accept_rate", "acceptance_length", "tokens_per_verify"}


@pytest.mark.parametrize(
    ("increment", "ratios"),
    [
        # accepted, proposed, verify, completion, emitted
        ((9, 15, 5, 15, 14), ALL),
        ((0, 0, 0, 0, 0), ALL),
        ((0, 8, 2, 2, 2), ALL),
        ((8, 8, 2, 10, 10), ALL),
        # unknown halves
        ((None, None, None, None, None), set()),
        ((None, None, None, 7, None), set()),
        ((None, 15, 5, 15, 14), {"acceptance_length", "tokens_per_verify"}),
        ((9, None, 5, 15, 14), {"acceptance_length", "tokens_per_verify"}),
        ((9, 15, None, 15, 14), {"accept_rate"}),
        ((9, 15, 5, None, 14), {"accept_rate", "acceptance_length"}),
        ((9, 15, 5, 15, None), {"accept_rate", "tokens_per_verify"}),
        # inconsistent halves
        ((5, 4, 1, 6, 6), {"acceptance_length", "tokens_per_verify"}),  # accepted > proposed
        ((2, 4, 1, 9, 4), {"accept_rate", "tokens_per_verify"}),  # emitted > accepted + verify
        ((2, 4, 1, 9, 3), ALL),
        ((9, 15, 5, 13, 14), {"accept_rate", "tokens_per_verify"}),  # emitted > completion
        ((9, 15, 5, 14, 14), ALL),
        # a bound holds only where it is known
        ((None, None, 1, 9, 9), {"acceptance_length", "tokens_per_verify"}),
        ((None, None, 1, 8, 9), {"tokens_per_verify"}),
        ((2, None, 1, None, 4), set()),
        ((2, None, 1, None, 3), {"acceptance_length"}),
        # no upper bound of k + 1 on completion, nor a lower one
        ((0, 0, 1, 4000, 1), ALL),
        ((3, 4, 4, 1, 1), ALL),
    ],
)
def test_a_ratio_wants_both_halves_known_and_consistent(increment: tuple[int | None, ...], ratios: set[str]) -> None:
    assert ratios_holding(SpecCounts(*increment)) == ratios


def report(**fields: Any) -> GenerationReport:
    told: dict[str, Any] = {"generation_id": "g", "counts": SpecCounts()}
    return GenerationReport(**(told | fields))


def test_a_report_is_final_and_knows_nothing_unless_it_says_so() -> None:
    made = report()
    assert made.finished
    for field in dataclasses.fields(made):
        if field.name not in ("generation_id", "counts", "finished"):
            assert getattr(made, field.name) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"generation_id": ""}, "generation_id"),
        ({"generation_id": None}, "generation_id"),
        ({"generation_id": 7}, "generation_id"),
        ({"generation_id": b"g"}, "generation_id"),
        ({"counts": None}, "counts"),
        ({"counts": {"accepted": 1}}, "counts"),
        ({"session_id": 7}, "session_id"),
        ({"sample_id": 7}, "sample_id"),
        ({"model": b"m"}, "model"),
        ({"provider": 1.5}, "provider"),
        ({"method": True}, "method"),
        ({"engine_index": -1}, "engine_index"),
        ({"engine_index": True}, "engine_index"),
        ({"engine_index": "0"}, "engine_index"),
        ({"engine_index": 0.0}, "engine_index"),
        ({"finished": None}, "finished"),
        ({"finished": 1}, "finished"),
        ({"finished": "stop"}, "finished"),
        ({"accepted_by_position": [1, -1]}, "accepted_by_position"),
        ({"accepted_by_position": [True]}, "accepted_by_position"),
        ({"accepted_by_position": [None]}, "accepted_by_position"),
        ({"accepted_by_position": "12"}, "accepted_by_position"),
        ({"accepted_by_position": 12}, "accepted_by_position"),
        ({"accepted_by_position": b"12"}, "accepted_by_position"),
        ({"accepted_by_position": {0: 12}}, "accepted_by_position"),
        ({"accepted_by_position": {12}}, "accepted_by_position"),
        ({"proposed_by_position": [1.0]}, "proposed_by_position"),
        ({"proposed_by_position": [2**63]}, "proposed_by_position"),
        ({"proposed_by_position": object()}, "proposed_by_position"),
    ],
)
def test_a_report_names_the_field_that_is_wrong(fields: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        report(**fields)


def test_positions_may_come_in_any_sequence_and_are_kept_unchanged() -> None:
    mutable = [3, 2, 1]
    made = report(accepted_by_position=mutable, proposed_by_position=iter((Indexed(4), 4, 4)))
    mutable.clear()
    assert made.accepted_by_position == (3, 2, 1)
    assert made.proposed_by_position == (4, 4, 4)


def test_the_context_is_no_part_of_a_report_s_identity() -> None:
    with_context = report(context=context.set_value("key", "value"))
    assert with_context == report()
    assert hash(with_context) == hash(report())
    assert "context" not in repr(with_context)


def test_reports_can_be_copied_and_pickled() -> None:
    made = report(session_id="s", accepted_by_position=[1], proposed_by_position=[2], engine_index=3)
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))
