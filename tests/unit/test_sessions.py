"""Agentic rollouts: a generation is committed once, exported any number of times, or discarded before."""

from __future__ import annotations

import threading

import pytest

from otel_specdec import CommitRefusedError, GenerationReport, RolloutSession, SpecCounts, SpecDecRecorder
from tests.unit.collected import Meter

COUNTS = {"A": (1, 2, 1, 2), "B": (9, 10, 2, 11), "C": (2, 4, 1, 3)}


def report(generation: str, *counts: int) -> GenerationReport:
    return GenerationReport(generation, SpecCounts(*(counts or COUNTS[generation])), model="m")


@pytest.fixture
def session() -> RolloutSession:
    return RolloutSession("rollout 7")


def commit(session: RolloutSession, *generations: str, after: str | None = None) -> None:
    branch = session.branch(after)
    for generation in generations:
        branch.add(report(generation))
    branch.commit()


def ids(reports: list[GenerationReport]) -> list[str]:
    return [each.generation_id for each in reports]


def test_a_shared_beginning_is_committed_once_and_exported_with_each_branch(session: RolloutSession) -> None:
    commit(session, "A", "B")
    commit(session, "C", after="A")
    assert ids(session.reports()) == ["A", "B", "C"]
    assert list(map(ids, session.trajectories())) == [["A", "B"], ["A", "C"]]
    assert ids(session.trajectory("A")) == ["A"]
    assert ids(session.trajectory("C")) == ["A", "C"]


def test_any_number_of_exports_counts_each_generation_once(session: RolloutSession) -> None:
    commit(session, "A", "B")
    commit(session, "C", after="A")
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    exported = [each for trajectory in session.trajectories() for each in trajectory]
    summary = recorder.record_batch(exported)
    assert (summary.generations, summary.reports, summary.duplicates) == (3, 4, 1)
    recorder.record_batch(session.reports())
    recorder.record_batch(session.trajectory("B"))
    assert meter.totals() == {"accepted": 12, "proposed": 16, "verify": 4, "completion": 16, "generations": 3}
    assert meter.pooled().ratios["accept_rate"] == 0.75


def test_what_is_committed_is_the_session_s(session: RolloutSession) -> None:
    commit(session, "A")
    (committed,) = session.reports()
    assert committed == GenerationReport("A", SpecCounts(1, 2, 1, 2), session_id="rollout 7", model="m")


def test_the_same_ids_in_two_sessions_are_other_generations() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for name in ("one", "two"):
        session = RolloutSession(name)
        commit(session, "A")
        recorder.record_batch(session.reports())
    assert meter.totals()["generations"] == 2


def test_nothing_is_exported_before_its_commit(session: RolloutSession) -> None:
    branch = session.branch()
    branch.add(report("A"))
    assert session.reports() == []
    assert branch.tip == "A"
    branch.commit()
    branch.add(report("B"))
    assert ids(session.reports()) == ["A"]
    branch.commit()
    assert list(map(ids, session.trajectories())) == [["A", "B"]]


def test_a_branch_that_is_discarded_leaves_no_trace_but_what_it_had_committed(session: RolloutSession) -> None:
    branch = session.branch()
    branch.add(report("A"))
    branch.commit()
    branch.add(report("B"))
    branch.discard()
    assert branch.tip == "A"
    assert ids(session.reports()) == ["A"]
    branch.add(report("C"))
    branch.commit()
    assert list(map(ids, session.trajectories())) == [["A", "C"]]


def test_two_branches_that_hold_the_same_beginning_commit_it_once(session: RolloutSession) -> None:
    one, two = session.branch(), session.branch()
    for branch, last in ((one, "B"), (two, "C")):
        branch.add(report("A"))
        branch.add(report(last))
    one.commit()
    two.commit()
    two.commit()
    assert ids(session.reports()) == ["A", "B", "C"]


def test_a_commit_with_other_counts_is_refused_and_changes_nothing(session: RolloutSession) -> None:
    commit(session, "A")
    before = session.reports()
    branch = session.branch()
    branch.add(report("C"))
    branch.add(report("A", 1, 3, 1, 2))
    for _ in range(2):
        with pytest.raises(CommitRefusedError, match=r"'A'.*other counts"):
            branch.commit()
        assert session.reports() == before
        assert branch.tip == "A"  # the branch is as it was, too
    branch.discard()
    branch.add(report("C"))
    branch.commit()
    assert ids(session.reports()) == ["A", "C"]


def test_a_known_count_is_not_an_unknown_one(session: RolloutSession) -> None:
    commit(session, "A")
    branch = session.branch()
    branch.add(report("A", 1, 2, 1))
    with pytest.raises(CommitRefusedError):
        branch.commit()


def test_a_generation_has_one_place_in_the_tree(session: RolloutSession) -> None:
    commit(session, "A", "B")
    branch = session.branch()
    branch.add(report("B"))
    with pytest.raises(CommitRefusedError, match="committed after 'A', not None"):
        branch.commit()
    assert list(map(ids, session.trajectories())) == [["A", "B"]]


def test_what_an_export_hands_out_can_be_changed_without_touching_the_session(session: RolloutSession) -> None:
    commit(session, "A", "B")
    for export in (session.reports(), session.trajectory("B"), session.trajectories()[0], session.trajectories()):
        export.clear()
    data = session.trajectory("B")[0].as_dict()
    counts = data["counts"]
    assert isinstance(counts, dict)
    counts["accepted"] = 99
    assert ids(session.reports()) == ["A", "B"]
    assert session.reports()[0].counts.accepted == 1


def test_a_branch_takes_finished_generations_once_each(session: RolloutSession) -> None:
    branch = session.branch()
    branch.add(report("A"))
    with pytest.raises(ValueError, match="already"):
        branch.add(report("A"))
    with pytest.raises(ValueError, match="not finished"):
        branch.add(GenerationReport("B", SpecCounts(1, 2), finished=False))
    branch.commit()
    with pytest.raises(ValueError, match="already"):
        branch.add(report("A"))


def test_a_resumed_generation_is_added_once_with_the_sum_of_its_parts(session: RolloutSession) -> None:
    branch = session.branch()
    parts = [SpecCounts(1, 4, 1, 3), SpecCounts(5, 8, 2, 7)]
    branch.add(GenerationReport("A", parts[0].plus(parts[1])))
    branch.commit()
    assert session.reports()[0].counts == SpecCounts(6, 12, 3, 10)


@pytest.mark.parametrize("after", ["X", "", "A"])
def test_a_branch_begins_at_a_committed_generation(session: RolloutSession, after: str) -> None:
    with pytest.raises(KeyError, match="not committed"):
        session.branch(after)


def test_there_is_no_trajectory_to_what_is_not_committed(session: RolloutSession) -> None:
    with pytest.raises(KeyError):
        session.trajectory("X")


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_session_has_an_id(name: str) -> None:
    with pytest.raises(ValueError, match="session_id"):
        RolloutSession(name)


def test_branches_may_commit_from_many_threads(session: RolloutSession) -> None:
    commit(session, "A")
    start = threading.Barrier(16)

    def work(number: int) -> None:
        start.wait(timeout=30)
        for n in range(20):
            branch = session.branch("A")
            branch.add(report(f"{number}-{n}", 1, 2, 1, 2))
            branch.commit()
            session.trajectories()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(session.reports()) == 1 + 16 * 20
    assert len(session.trajectories()) == 320


def test_a_long_rollout_is_no_deep_recursion(session: RolloutSession) -> None:
    branch = session.branch()
    for n in range(20_000):
        branch.add(report(str(n), 1, 2, 1, 2))
    branch.commit()
    assert len(session.trajectory("19999")) == 20_000
