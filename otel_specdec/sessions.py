"""Agentic rollouts: a tree of generations whose branches share their beginnings, each generation in it once.

Free of OpenTelemetry; a session is as large as its reports and belongs to one rollout. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from otel_specdec.counts import GenerationReport


class CommitRefusedError(ValueError):
    """A branch holds a generation that its session knows with other counts or in another place; nothing has changed."""


class _Node(NamedTuple):
    report: GenerationReport
    parent: str | None


class RolloutSession:
    """The generations of one rollout, committed branch by branch.

    An agent that forks makes several trajectories with the same beginning. Whoever sums over trajectories counts that
    beginning once for each; here each generation is committed once, under this session's id, and may be exported any
    number of times. `recorder.record_batch(session.reports())` counts all of them; trajectories may be handed over as
    well, in any number, because a recorder counts by `(session_id, generation_id)`.

    Args:
        session_id: unique among the rollouts that one recorder sees; not empty.

    Raises:
        ValueError: `session_id` is not a string, or empty.
    """

    def __init__(self, session_id: str) -> None:
        if not isinstance(session_id, str) or not session_id:
            raise ValueError("session_id must be a non-empty string")
        self.session_id = session_id
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}

    def branch(self, after: str | None = None) -> Branch:
        """A new branch: from the root, or after a committed generation.

        Raises:
            KeyError: no generation with this id is committed.
        """
        with self._lock:
            if after is not None and after not in self._nodes:
                raise KeyError(f"generation {after!r} is not committed in session {self.session_id!r}")
        return Branch(self, after)

    def reports(self) -> list[GenerationReport]:
        """Every committed generation once, in the order of their commits."""
        with self._lock:
            return [node.report for node in self._nodes.values()]

    def trajectory(self, generation_id: str) -> list[GenerationReport]:
        """The generations from the root to this one. The list is the caller's own, to change as it likes.

        Raises:
            KeyError: no generation with this id is committed.
        """
        with self._lock:
            path = [node.report for node in self._up_from(generation_id)]
        return path[::-1]

    def trajectories(self) -> list[list[GenerationReport]]:
        """One trajectory for each generation that nothing was committed after."""
        with self._lock:
            parents = {node.parent for node in self._nodes.values()}
            leaves = [generation_id for generation_id in self._nodes if generation_id not in parents]
            return [[node.report for node in self._up_from(leaf)][::-1] for leaf in leaves]

    def _up_from(self, generation_id: str | None) -> Iterator[_Node]:
        while generation_id is not None:
            node = self._nodes[generation_id]
            yield node
            generation_id = node.parent

    def _commit(self, nodes: dict[str, _Node]) -> None:
        with self._lock:
            for generation_id, node in nodes.items():
                known = self._nodes.get(generation_id)
                if known is None:
                    continue
                if known.report.counts != node.report.counts:
                    raise CommitRefusedError(
                        f"generation {generation_id!r} of session {self.session_id!r} is committed with other counts"
                    )
                if known.parent != node.parent:
                    raise CommitRefusedError(
                        f"generation {generation_id!r} of session {self.session_id!r} is committed after "
                        f"{known.parent!r}, not {node.parent!r}"
                    )
            for generation_id, node in nodes.items():
                self._nodes.setdefault(generation_id, node)


class Branch:
    """A branch of a session that is still going on; made by `RolloutSession.branch`. One thread at a time."""

    def __init__(self, session: RolloutSession, after: str | None) -> None:
        self._session = session
        self._start = after
        self._pending: dict[str, _Node] = {}

    @property
    def tip(self) -> str | None:
        """The id of the branch's last generation, committed or not; None at the root."""
        return next(reversed(self._pending), self._start)

    def add(self, report: GenerationReport) -> None:
        """Add a generation at the tip; it becomes the session's, whatever session its report names.

        A generation that was resumed over several requests is added once, with the sum of its parts
        (`SpecCounts.plus`).

        Raises:
            ValueError: the generation has not finished, or is on this branch already.
        """
        if not report.finished:
            raise ValueError(f"generation {report.generation_id!r} has not finished")
        if report.generation_id in self._pending or report.generation_id == self._start:
            raise ValueError(f"generation {report.generation_id!r} is on this branch already")
        node = _Node(replace(report, session_id=self._session.session_id), self.tip)
        self._pending[report.generation_id] = node

    def commit(self) -> None:
        """Commit what was added since the last commit; all of it, or nothing.

        Generations that another branch has committed before, with the same counts and in the same place, stay as they
        are.

        Raises:
            CommitRefusedError: one of them is committed with other counts or in another place; neither the session nor
                the branch has changed.
        """
        self._session._commit(self._pending)
        self._start = self.tip
        self._pending = {}

    def discard(self) -> None:
        """Forget what was added since the last commit: it is in no export and is never counted here.

        The engine did generate it, so whoever counts in the engine counts it all the same.
        """
        self._pending = {}
