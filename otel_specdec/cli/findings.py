"""What the doctor says: findings, as text or JSON, and the exit status that follows from them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final, TextIO

FINE: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # as shells have it for SIGINT


class State(str, Enum):
    """How a finding stands; only `PROBLEM` makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    """Works; good to know."""
    WARNING = "warning"
    """Something is lacking, may be lacking, or could not be looked at."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: the heading it stands under. check: its name for scripts, which stays. state: see `State`. says: what was
            found, in a plain sentence or two. do: what to do about it; empty where nothing is to be done.
    """

    topic: str
    check: str
    state: State
    says: str
    do: str = ""


class Topic(str):
    """A heading, and the findings under it."""

    def ok(self, check: str, says: str) -> Finding:
        """Nothing to do."""
        return Finding(self, check, State.OK, says)

    def note(self, check: str, says: str, do: str) -> Finding:
        """See `State.NOTE`."""
        return Finding(self, check, State.NOTE, says, do)

    def warning(self, check: str, says: str, do: str) -> Finding:
        """See `State.WARNING`."""
        return Finding(self, check, State.WARNING, says, do)

    def problem(self, check: str, says: str, do: str) -> Finding:
        """See `State.PROBLEM`."""
        return Finding(self, check, State.PROBLEM, says, do)

    def finding(self, check: str, state: State, says: str, do: str = "") -> Finding:
        """One whose state has to be found out."""
        return Finding(self, check, state, says, do)


def exit_status(findings: Iterable[Finding]) -> int:
    """1 where something will not work, else 0."""
    return PROBLEM if any(finding.state is State.PROBLEM for finding in findings) else FINE


_MARKS: Final = {State.OK: "ok", State.NOTE: "note", State.WARNING: "warning", State.PROBLEM: "PROBLEM"}
_COLOURS: Final = {State.OK: "32", State.NOTE: "36", State.WARNING: "33", State.PROBLEM: "1;31"}


def show(findings: Sequence[Finding], *, as_json: bool, out: TextIO | None = None) -> None:
    """Print them all (to standard output by default); colours only on a terminal, and not where NO_COLOR is set."""
    out = out or sys.stdout
    if as_json:
        print(json.dumps({"status": exit_status(findings), "findings": [asdict(each) for each in findings]}), file=out)
        return
    colours = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 110))
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            print(f"\n{finding.topic}" if topic else finding.topic, file=out)
            topic = finding.topic
        mark = f"{_MARKS[finding.state]:>9}  "
        text = _filled(finding.says, width, " " * 11)[11:]
        print((f"\033[{_COLOURS[finding.state]}m{mark}\033[0m" if colours else mark) + text, file=out)
        if finding.do:
            print(_filled(finding.do, width, " " * 11 + "→ "), file=out)
    counts = {state: sum(each.state is state for each in findings) for state in State}
    print(
        f"\n{_number(counts[State.PROBLEM], 'problem')}, {_number(counts[State.WARNING], 'warning')}, "
        f"{_number(counts[State.NOTE], 'note')}; {counts[State.OK]} fine.",
        file=out,
    )


def _filled(text: str, width: int, first: str) -> str:
    # Words are never broken: options, URLs and commands are there to be copied.
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
