"""What a recorder remembers is small and says the same as the whole: digests for identities, packed states."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from otel_specdec.counts import LARGEST
from otel_specdec.generations import Addition, Finished, Running
from otel_specdec.windows import Window, digest_of
from tests.unit.collected import Meter

ALIKE = [
    (None, "a"), ("", "a"), ("a", "a"), ("a", "aa"), ("aa", "a"), (None, "aaa"), ("None", "a"), (None, "-a"),
    ("-", "a"), (None, "1-aa"), ("1-a", "a"), ("1", "-aa"), ("1-", "aa"), ("", "1-aa"), (None, "0-a"),
    ("\ud800", "\udc00"), (None, "\ud800\udc00"), (None, "\U00010000"), ("\0", "a"), (None, "\0a"), ("", "\0a"),
]  # fmt: skip


def test_identities_that_read_alike_are_told_apart() -> None:
    assert len(set(map(digest_of, ALIKE))) == len(set(ALIKE)) == len(ALIKE)


text = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(["", "1-", "-", "\ud800"])
identity = st.tuples(st.none() | text, text.filter(bool))


@given(identity, identity)
def test_equal_digests_are_equal_identities(one: tuple[str | None, str], two: tuple[str | None, str]) -> None:
    assert (digest_of(one) == digest_of(two)) == (one == two)


count = st.none() | st.integers(0, 5) | st.sampled_from([LARGEST, LARGEST - 1])
lists = st.none() | st.lists(st.integers(0, 3) | st.just(LARGEST), max_size=3)


@given(
    st.lists(st.tuples(st.tuples(count, count, count, count, count), st.booleans(), lists, lists), max_size=8),
    st.sampled_from([None, True]),
)
def test_a_packed_state_judges_every_report_as_the_state_itself(
    rows: list[tuple[Any, bool, Any, Any]], speculation: bool | None
) -> None:
    whole: Running | Finished = Running()
    packed: Running | Finished = Running()
    for counts, finished, accepted, proposed in rows:
        report = GenerationReport(
            "g",
            SpecCounts(*counts),
            finished=finished,
            accepted_by_position=accepted,
            proposed_by_position=proposed,
        )
        said = whole.take(report, speculation=speculation)
        assert comparable(packed.take(report, speculation=speculation)) == comparable(said)
        if isinstance(said, Addition):
            if finished and isinstance(whole, Running) and isinstance(packed, Running):
                whole, packed = whole.finish(report), packed.finish(report)
                assert packed == whole
            packed = type(packed).unpacked(packed.packed())
    if isinstance(whole, Finished):
        assert packed == whole


def comparable(verdict: Any) -> Any:
    if isinstance(verdict, Addition) and verdict.positions is not None:
        return verdict._replace(positions=tuple(map(list, verdict.positions)))  # type: ignore[arg-type]
    return verdict


def key(number: int) -> bytes:
    return digest_of((None, str(number)))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 1000])
def test_a_window_keeps_at_least_its_size_of_the_latest_and_a_64th_more(size: int) -> None:
    window = Window(size)
    for number in range(3 * size):
        window.put(key(number), b"")
        assert len(window) <= size + size // 64
        assert all(key(each) in window for each in range(max(0, number + 1 - size), number + 1))
    assert key(0) not in window


def test_what_is_put_again_is_the_latest() -> None:
    window = Window(3)
    for number in (1, 2, 3, 1, 4, 5):
        window.put(key(number), b"%d" % number)
    assert [window.get(key(number)) for number in (1, 2, 3, 4, 5)] == [b"1", None, None, b"4", b"5"]


def test_putting_says_whether_another_had_to_go() -> None:
    window = Window(2)
    assert [window.put(key(number), b"") for number in (1, 2, 1, 2, 3, 3)] == [False] * 4 + [True, False]
    window.forget(key(3))
    window.forget(key(3))
    assert not window.put(key(4), b"")


def test_a_long_id_takes_no_more_memory_than_a_short_one() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    tracemalloc.start()
    try:
        for number, finished in itertools.product(range(20), (False, True)):
            long = f"{number}" + "x" * 1_000_000
            recorder.record(GenerationReport(long, SpecCounts(1, 2, 1, 2, 2), session_id=long, finished=finished))
            del long
        meter.points()  # the candidates for exemplars, a bounded number, do hold their ids until they are named
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000
    assert meter.totals()["generations"] == 20
