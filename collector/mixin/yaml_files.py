"""Rule files as text: YAML with the reason above each rule, which a YAML library would lose."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

WIDTH = 118


@dataclass(frozen=True)
class Rule:
    """A recording rule, or an alert where `alert` is set."""

    record: str
    expr: str
    why: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    alert: bool = False
    hold: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated in order, at the same time."""

    name: str
    rules: Sequence[Rule]
    why: str = ""
    interval: str = ""
    query_offset: str = ""


def rule_file(head: str, groups: Iterable[Group]) -> str:
    """The whole file."""
    lines = [
        *_comment(head, ""),
        "#",
        "# Written by `make mixin`: change collector/mixin, not this file.",
        "",
        "groups:",
    ]
    for group in groups:
        lines += _comment(group.why, "  ")
        lines.append(f"  - name: {group.name}")
        if group.interval:
            lines.append(f"    interval: {group.interval}")
        if group.query_offset:
            lines.append(f"    query_offset: {group.query_offset}")
        lines.append("    rules:")
        for rule in group.rules:
            lines += _rule(rule)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _rule(rule: Rule) -> Iterator[str]:
    yield from _comment(rule.why, "      ")
    yield f"      - {'alert' if rule.alert else 'record'}: {rule.record}"
    expr = rule.expr.strip()
    if "\n" in expr or len(expr) > WIDTH - 14 or ": " in expr or " #" in expr or expr[0] in "\"'{[":
        yield "        expr: |"
        yield from textwrap.indent(expr, "          ").splitlines()
    else:
        yield f"        expr: {expr}"
    if rule.hold:
        yield f"        for: {rule.hold}"
    if rule.labels:
        yield "        labels: {" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in rule.labels.items()) + "}"
    if rule.annotations:
        yield "        annotations:"
        for key, value in rule.annotations.items():
            yield f"          {key}: {json.dumps(value, ensure_ascii=False)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    """A comment: paragraphs wrapped, what is indented in the text left as it is."""
    width = WIDTH - len(indent) - 2
    for number, paragraph in enumerate(textwrap.dedent(text).strip("\n").rstrip().split("\n\n")):
        if number:
            yield f"{indent}#"
        if paragraph.startswith(" "):
            yield from (f"{indent}#   {line}" for line in textwrap.dedent(paragraph).splitlines())
        elif paragraph:
            words = " ".join(paragraph.split())
            yield from (f"{indent}# {line}" for line in textwrap.wrap(words, width, break_on_hyphens=False))
