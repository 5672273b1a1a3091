"""`otel-specdec migrate dashboard.json`: a Grafana dashboard on the engines' own metrics, moved to the pooled ones.

Every query that asks for an engine's speculation metrics is rewritten for the names that `specdec.rules.yml` records,
or is left as it is and said to be; nothing else of the dashboard changes. A second run finds nothing to do. It reads
one file, writes at most one, and asks nobody over the network. The rewriting itself is in `queries`, which needs the
extra `migrate`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from otel_specdec.cli.queries import Rewritten

DONE, LEFT, BAD_INPUT = 0, 1, 2
"""Exit statuses: nothing is left on the engines' own metrics; something is; there was no dashboard to read."""

DESCRIPTION = """Rewrites the queries of a Grafana dashboard that ask for vLLM's or SGLang's own metrics of speculative
decoding, for the names that our Prometheus rules record. Says what was rewritten, and what could not be and why."""

_RULES = "the rules (collector/prometheus/rules) have to be loaded where the dashboard asks"


class DashboardError(ValueError):
    """A file that is no dashboard, with what is wrong with it."""


@dataclass(frozen=True)
class Query:
    """One query of a dashboard, and what became of it. Exactly one of `new` and `why_not` is set."""

    panel: str
    ref: str
    old: str
    new: str | None = None
    notes: tuple[str, ...] = ()
    why_not: str | None = None


@dataclass
class Migration:
    """A dashboard's new content, its queries that asked for an engine's metrics, and how many others it has."""

    dashboard: Any
    queries: list[Query] = field(default_factory=list)
    others: int = 0

    @property
    def rewritten(self) -> list[Query]:
        """The queries that were replaced."""
        return [query for query in self.queries if query.new is not None]

    @property
    def left(self) -> list[Query]:
        """The queries that could not be."""
        return [query for query in self.queries if query.why_not is not None]

    def report(self) -> str:
        """What was done, panel by panel, for people."""
        lines = []
        for query in self.queries:
            lines.append(f"{query.panel}{f', {query.ref}' if query.ref else ''}: {self._outcome(query)}")
            lines.append(f"  - {_one_line(query.old)}")
            if query.new is not None:
                lines.append(f"  + {_one_line(query.new)}")
            lines += [f"    {note}" for note in query.notes]
        counts = f"{len(self.rewritten)} rewritten, {len(self.left)} left as they are, {self.others} others untouched"
        return "\n".join([*lines, f"queries: {counts}", *([f"now {_RULES}"] if self.rewritten else [])])

    @staticmethod
    def _outcome(query: Query) -> str:
        return "rewritten" if query.why_not is None else f"left as it is: {query.why_not}"


def migrate(dashboard: Any, labels: Mapping[str, str] | None = None) -> Migration:
    """Rewrite a dashboard's queries in place.

    Whatever holds a text `expr` is a query: panels, those in rows and library panels, annotations, the export of an
    API, and the newer schema with `elements`. Variables (`label_values(…)`) are no such queries; those that name an
    engine's speculation metric are said to be left.

    Args:
        dashboard: the dashboard, as JSON gives it.
        labels: labels of the engine's metrics that ours have too, by their names in ours.

    Raises:
        ModuleNotFoundError: the extra `migrate` is not installed.
    """
    from otel_specdec.cli import queries

    result = Migration(dashboard)
    for panel, target in _objects(dashboard):
        where = (panel, str(target.get("refId", "")))
        query = target.get("expr")
        if not isinstance(query, str):
            variable = target.get("query", target.get("definition"))
            if isinstance(variable, str) and (asked := queries.asked(variable)):
                why_not = f"a variable with values of {asked[0]}: take those of specdec:generations:rate5m"
                result.queries.append(Query(*where, variable, why_not=why_not))
        elif not queries.asked(query):
            result.others += 1
        else:
            try:
                new = queries.rewrite(query, labels)
            except queries.CannotRewriteError as error:
                result.queries.append(Query(*where, query, why_not=str(error)))
            else:
                notes = (*new.notes, *_rewrite_legend(target, new))
                target["expr"] = new.query
                result.queries.append(Query(*where, query, new=new.query, notes=notes))
    return result


def _objects(node: Any, title: str = "dashboard") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that may hold a query, with the title of what it belongs to."""
    if isinstance(node, dict):
        own = node.get("title") or node.get("name")
        title = own if isinstance(own, str) else title
        yield title, node
        for value in list(node.values()):
            yield from _objects(value, title)
    elif isinstance(node, list):
        for value in node:
            yield from _objects(value, title)


def _rewrite_legend(target: dict[str, Any], new: Rewritten) -> list[str]:
    """`{{model_name}}` and so on, by the labels that the new series have; a note for those that they do not have."""
    legend = target.get("legendFormat")
    if not isinstance(legend, str):
        return []
    lost = []

    def renamed(match: re.Match[str]) -> str:
        name = new.labels.get(match[1])
        if name is None or not new.has(name):
            lost.append(match[1])
        return f"{{{{{name or match[1]}}}}}"

    target["legendFormat"] = re.sub(r"\{\{\s*(\w+)\s*\}\}", renamed, legend)
    return [f"the legend names {', '.join(lost)}, which the series do not have"] if lost else []


def _one_line(query: str) -> str:
    return " ".join(query.split())


def read(path: Path) -> tuple[Any, str]:
    """A dashboard and its text.

    Raises:
        DashboardError: the file cannot be read, is no JSON object, or names one key twice, of which one would be lost.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DashboardError(f"{path} cannot be read: {error}") from None
    try:
        dashboard = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DashboardError(f"{path} is no JSON: {error}") from None
    if not isinstance(dashboard, dict):
        raise DashboardError(f"{path} is no dashboard: it holds a {type(dashboard).__name__}, not an object")
    return dashboard, text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise DashboardError(f"the key {next(each for each in names if names.count(each) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise DashboardError(f"it has a value {name}, which is no JSON")


def text_of(dashboard: Any, like: str) -> str:
    """JSON text, indented and ended as `like` is."""
    indent = re.search(r"\{\r?\n([ \t]+)\"", like)
    text = json.dumps(dashboard, indent=indent[1] if indent else None, ensure_ascii=like.isascii())
    return text + ("\n" if like.endswith("\n") else "")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all: OUT may be the dashboard itself."""
    mode = path.stat().st_mode if path.exists() else 0o644
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(new, mode)
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The subcommand's arguments; `run` is its default `run`."""
    parser = subparsers.add_parser(
        "migrate",
        help="rewrite a Grafana dashboard on an engine's own averaged metrics into pooled queries",
        description=DESCRIPTION,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("dashboard", type=Path, help="the dashboard's JSON, as Grafana exports it")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="where to write it (may be the same file); else standard output",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a label of the engine's metrics that ours have too, as NEW: to filter and group by (may be repeated)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command: 0 nothing is left on the engines' metrics, 1 something is, 2 the input is no dashboard."""
    try:
        labels = _labels(arguments.label)
        dashboard, text = read(arguments.dashboard)
        result = migrate(dashboard, labels)
        new = text_of(result.dashboard, text) if result.rewritten else text
        if arguments.output is None:
            sys.stdout.write(new)
        else:
            write(arguments.output, new)
    except DashboardError as error:
        print(f"otel-specdec migrate: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"otel-specdec migrate: {arguments.output} cannot be written: {error}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        print(f"otel-specdec migrate: {error}; pip install 'otel-specdec[migrate]'", file=sys.stderr)
        return BAD_INPUT
    print(result.report(), file=sys.stderr)
    return LEFT if result.left else DONE


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        if not re.fullmatch(r"[A-Za-z_]\w*=[A-Za-z_]\w*", pair):
            raise DashboardError(f"--label takes OLD=NEW, two names of labels, and not {pair!r}")
        old, _, labels[old] = pair.partition("=")
    return labels


def main(arguments: Sequence[str] | None = None) -> int:
    """The command by itself."""
    parser = argparse.ArgumentParser(prog="otel-specdec migrate", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
