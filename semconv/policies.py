"""The rules that OpenTelemetry's Weaver policies hold a registry to, for a machine without Weaver.

Ours, after what those policies check (open-telemetry/opentelemetry-weaver-packages, `policies/check`) and the guides on
how to name things; not a translation. Each finding is a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, Final

Raw = Mapping[str, Any]

NAME: Final = re.compile(r"[a-z][a-z0-9]*([._][a-z0-9]+)*")
UNIT: Final = re.compile(r"(1|s|By|\{[a-z]+(_[a-z]+)*\})(/(s|By|\{[a-z]+(_[a-z]+)*\}))?")
"""As much of UCUM as metrics of tokens need: 1, seconds, bytes, annotations, and their quotients."""

STABILITIES: Final = ("development", "alpha", "beta", "release_candidate", "stable")
INSTRUMENTS: Final = ("counter", "updowncounter", "gauge", "histogram")
LEVELS: Final = ("required", "conditionally_required", "recommended", "opt_in")
PYTHON_TYPES: Final = {"string": str, "int": int, "double": float, "boolean": bool}


def findings(raw: Raw) -> list[str]:
    """What is wrong with the registry file `raw`; empty if nothing is."""
    attributes, metrics = raw["attributes"], raw["metrics"]
    return [
        *_names("attribute", [each["key"] for each in attributes]),
        *_names("metric", [each["name"] for each in metrics]),
        *_namespaces("attribute", "key", attributes),
        *_namespaces("metric", "name", metrics),
        *_described("attribute", "key", attributes),
        *_described("metric", "name", metrics),
        *_deprecations("attribute", "key", attributes),
        *_deprecations("metric", "name", metrics),
        *(finding for each in attributes for finding in _attribute(each)),
        *(finding for each in metrics for finding in _metric(each)),
        *_references(raw),
    ]


def _names(kind: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if not NAME.fullmatch(name):
            yield f"{kind} {name!r}: lower-case letters and digits, separated by '.' and '_'"
        if "." not in name:
            yield f"{kind} {name!r} has no namespace"
    for one, other in permutations(names, 2):
        if one < other and one.replace(".", "_") == other.replace(".", "_"):
            yield f"{kind} {one!r} and {other!r} are one constant in generated code"


def _namespaces(kind: str, field: str, each: Iterable[Raw]) -> Iterator[str]:
    names = [one[field] for one in each if not one.get("deprecated")]
    for one, other in permutations(names, 2):
        if other.startswith(f"{one}."):
            yield f"{kind} {one!r} is the namespace of {other!r}"


def _described(kind: str, field: str, each: Iterable[Raw]) -> Iterator[str]:
    for one in each:
        brief = (one.get("brief") or "").strip()
        if not brief.endswith("."):
            yield f"{kind} {one[field]!r} has no brief that is a sentence: {brief!r}"
        if one.get("stability") not in STABILITIES:
            yield f"{kind} {one[field]!r} has no stability of {', '.join(STABILITIES)}"


def _deprecations(kind: str, field: str, each: Sequence[Raw]) -> Iterator[str]:
    named = {one[field]: one for one in each}
    for name, one in named.items():
        deprecated = one.get("deprecated")
        if not deprecated:
            continue
        reason, successor = deprecated.get("reason"), named.get(deprecated.get("renamed_to"))
        if reason == "renamed":
            if successor is None or successor.get("deprecated"):
                yield f"{kind} {name!r} was renamed to nothing that is in force"
            elif any(one.get(what) != successor.get(what) for what in ("type", "unit", "instrument")):
                yield f"{kind} {name!r} was renamed to something else than it was"
        elif reason not in ("obsoleted", "uncategorized") or not deprecated.get("note"):
            yield f"{kind} {name!r} is deprecated without a word on what takes its place"


def _attribute(raw: Raw) -> Iterator[str]:
    key, kind, examples = raw["key"], raw["type"], raw.get("examples")
    if isinstance(kind, Mapping):
        members = kind["members"]
        for what in ("id", "value"):
            if len({member[what] for member in members}) < len(members):
                yield f"attribute {key!r} has two members of one {what}"
        for member in members:
            if not NAME.fullmatch(member["id"]) or not (member.get("brief") or "").strip().endswith("."):
                yield f"attribute {key!r}: member {member['id']!r} has a bad id or no brief that is a sentence"
        kind = {str: "string", int: "int"}.get(type(members[0]["value"]), "boolean")
    last = re.split(r"[._]", key)[-1]
    plural = last.endswith("s") and not last.endswith(("ss", "us", "is"))
    if kind.endswith("[]") != plural:
        yield f"attribute {key!r} is {kind}: the names of arrays are plural, and of nothing else"
    if not isinstance(examples, list) or not examples:
        yield f"attribute {key!r} has no examples"
    else:
        wanted = PYTHON_TYPES[kind.removesuffix("[]")]
        flat = [one for example in examples for one in (example if isinstance(example, list) else [example])]
        if any(type(one) is not wanted for one in flat):
            yield f"attribute {key!r} is {kind}, and has an example of another type"


def _metric(raw: Raw) -> Iterator[str]:
    name, unit = raw["name"], raw["unit"]
    if not UNIT.fullmatch(unit):
        yield f"metric {name!r}: {unit!r} is no unit of UCUM that we know"
    for annotation in re.findall(r"\{(\w+)\}", unit):
        if annotation.endswith("s"):
            yield f"metric {name!r}: a unit is singular, {unit!r} is not"
    if re.split(r"[._]", name)[-1] in ("total", "count", "counter", "gauge", "ratio"):
        yield f"metric {name!r}: what a backend appends (_total) and what an instrument is are no part of a name"
    if raw["instrument"] not in INSTRUMENTS:
        yield f"metric {name!r}: there is no instrument {raw['instrument']!r}"
    if raw.get("requirement_level") not in ("recommended", "opt_in"):
        yield f"metric {name!r} does not say whether it is emitted unasked"


def _references(raw: Raw) -> Iterator[str]:
    groups = {each["id"]: each for each in raw["attribute_groups"]}
    defined = {each["key"]: each for each in raw["attributes"]}
    used: set[str] = set()
    for owner, refs in [
        *((each["name"], each["attributes"]) for each in raw["metrics"]),
        *((name, each["attributes"]) for name, each in groups.items()),
    ]:
        for ref in refs:
            if "ref_group" in ref:
                used.add(ref["ref_group"])
                if ref["ref_group"] not in groups:
                    yield f"{owner} refers to a group {ref['ref_group']!r}, which there is not"
                continue
            used.add(ref["ref"])
            level = ref.get("requirement_level")
            if (level if isinstance(level, str) else next(iter(level or {"": ""}))) not in LEVELS:
                yield f"{owner}: {ref['ref']!r} has no requirement level"
            if isinstance(level, Mapping) and not all(map(str.strip, level.values())):
                yield f"{owner}: {ref['ref']!r} does not say under which condition"
            if ref["ref"] not in defined and not (ref.get("brief") and ref.get("examples")):
                yield f"{owner}: {ref['ref']!r}, defined elsewhere, has no brief and examples here"
    for name, group in groups.items():
        if group["visibility"] == "internal" and name not in used:
            yield f"group {name!r} is used nowhere"
    for key, attribute in defined.items():
        if key not in used and not attribute.get("deprecated"):
            yield f"attribute {key!r} is used nowhere"
