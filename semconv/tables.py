"""The registry as Markdown, put between marks into pages that are otherwise written by hand.

A mark is `<!-- semconv: NAME -->` on a line of its own, and what it holds ends at `<!-- end semconv -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from semconv.registry import Attribute, Metric, Registry, load

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
PAGES: Final = (ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("counters", "semantic-conventions", "proposal")))

_MARKED: Final = re.compile(r"(<!-- semconv: (?P<name>[a-z ]+) -->\n).*?(<!-- end semconv -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """The pages with the tables of the registry as it is, by path.

    Raises:
        KeyError: a page asks for a table that there is not.
    """
    registry = load()
    return {page: filled(page.read_text("utf-8"), registry) for page in PAGES}


def filled(text: str, registry: Registry) -> str:
    """`text` with what stands between its marks made anew."""

    def table(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{TABLES[mark['name']](registry)}\n\n{mark[3]}"

    return _MARKED.sub(table, text)


def metrics(registry: Registry) -> str:
    """The counters, a line each."""
    return _metrics(registry.counters)


def gauges(registry: Registry) -> str:
    """The collector's gauges, a line each."""
    return _metrics(registry.gauges)


def attributes(registry: Registry) -> str:
    """The attributes of the counters' points, with where each of them is."""
    rows = [
        (f"`{attribute.key}`", _on(attribute.key, registry.counters), attribute.brief, _values(attribute))
        for attribute in _all_of(registry.counters)
    ]
    return _table(("attribute", "on", "meaning", "values"), rows)


def exemplar(registry: Registry) -> str:
    """The filtered attributes of exemplars."""
    return _requirements(registry.exemplar)


def counters_in_full(registry: Registry) -> str:
    """Each counter with its attributes and when they are there; counters with the same ones together."""
    alike: dict[tuple[Attribute, ...], list[Metric]] = {}
    for metric in registry.counters:
        alike.setdefault(metric.attributes, []).append(metric)
    return "\n\n".join(_in_full(group) for group in alike.values())


def gauges_in_full(registry: Registry) -> str:
    """The gauges' attributes, which all of them share, and when they are there."""
    return _requirements(_all_of(registry.gauges))


def definitions(registry: Registry) -> str:
    """Our own attributes: type, meaning, values."""
    rows = [
        (
            f"`{attribute.key}`",
            attribute.type,
            " ".join(filter(None, (attribute.brief, attribute.note))),
            _values(attribute),
        )
        for attribute in registry.attributes.values()
    ]
    return _table(("attribute", "type", "meaning", "values"), rows)


TABLES: Final[Mapping[str, Callable[[Registry], str]]] = {
    "metrics": metrics,
    "gauges": gauges,
    "attributes": attributes,
    "exemplar": exemplar,
    "counters in full": counters_in_full,
    "gauges in full": gauges_in_full,
    "definitions": definitions,
}


def _metrics(which: Iterable[Metric]) -> str:
    rows = [(f"`{metric.name}`", f"`{metric.unit}`", metric.brief) for metric in which]
    return _table(("metric", "unit", "meaning"), rows)


def _in_full(group: Sequence[Metric]) -> str:
    notes = [f"- `{metric.name}`: {metric.note}" for metric in group if metric.note]
    named = ", ".join(f"`{metric.name}`" for metric in group)
    return "\n\n".join(filter(None, (named, _requirements(group[0].attributes), "\n".join(notes))))


def _requirements(which: Iterable[Attribute]) -> str:
    rows = [
        (f"`{attribute.key}`", attribute.level.replace("_", " "), attribute.condition, _values(attribute))
        for attribute in which
    ]
    return _table(("attribute", "requirement", "when", "values"), rows)


def _all_of(which: Iterable[Metric]) -> list[Attribute]:
    found: dict[str, Attribute] = {}
    for metric in which:
        for attribute in metric.attributes:
            found.setdefault(attribute.key, attribute)
    return list(found.values())


def _on(key: str, which: Sequence[Metric]) -> str:
    """Which metrics have the attribute, in the fewest words."""
    on = [metric.name for metric in which if key in metric.keys]
    off = [metric.name for metric in which if key not in metric.keys]
    if not off:
        return "all"
    names = ", ".join(f"`{name.removeprefix('specdec.')}`" for name in (on if len(on) <= len(off) else off))
    return names if len(on) <= len(off) else f"all but {names}"


def _values(attribute: Attribute) -> str:
    values: list[object] = [value for value, _ in attribute.members] or list(attribute.examples)
    shown = ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    return shown if attribute.members else f"{shown}, …" if len(values) > 1 else shown


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
