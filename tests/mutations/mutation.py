"""One change of the code that a test has to notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """`old`, which the file at `source` has once, becomes `new`; `tests` fails then."""

    name: str
    source: str
    old: str
    new: str
    tests: str


def removed(name: str, module: str, text: str) -> tuple[str, str, str, str]:
    """`text` is taken out."""
    return name, module, text, ""
