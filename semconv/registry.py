"""The registry with references resolved, as far as our own files go.

What an attribute of the dependency (`gen_ai.*`, `error.type`) is in itself stands there; here it has the brief and the
examples of its references.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Attribute:
    """An attribute, as one signal has it or (`level` "") as it is defined.

    Attributes:
        key: its name.
        type: `string`, `int`, …; "" for one that is defined elsewhere.
        brief, note: what it is, in one sentence and in more.
        examples: values.
        members: the values that there are, each with what it means, where they are counted.
        level: `required`, `recommended` or `opt_in`, or `conditionally_required`.
        condition: the condition of the last one.
    """

    key: str
    type: str = ""
    brief: str = ""
    note: str = ""
    examples: tuple[Any, ...] = ()
    members: tuple[tuple[Any, str], ...] = ()
    level: str = ""
    condition: str = ""


@dataclass(frozen=True)
class Metric:
    """A metric with its attributes, in the order of the registry."""

    name: str
    instrument: str
    unit: str
    brief: str
    note: str
    value_type: str
    attributes: tuple[Attribute, ...]

    @property
    def keys(self) -> frozenset[str]:
        """Names of its attributes."""
        return frozenset(attribute.key for attribute in self.attributes)


@dataclass(frozen=True)
class Registry:
    """All that is registered.

    Attributes:
        attributes: our own definitions, by name.
        metrics: by name, in the order of the file.
        exemplar: the filtered attributes of exemplars.
        raw: the file itself, for what is only checked.
        manifest: the manifest itself.
    """

    attributes: Mapping[str, Attribute]
    metrics: Mapping[str, Metric]
    exemplar: tuple[Attribute, ...]
    raw: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def counters(self) -> list[Metric]:
        """What the package emits."""
        return [metric for metric in self.metrics.values() if metric.instrument == "counter"]

    @property
    def gauges(self) -> list[Metric]:
        """What the collector pipeline makes of it."""
        return [metric for metric in self.metrics.values() if metric.instrument == "gauge"]


def load(folder: Path = FOLDER) -> Registry:
    """Read the registry in `folder`.

    Raises:
        ValueError: two attributes, groups or metrics have one name, or a metric has an attribute twice.
        KeyError: a reference leads nowhere, or something required is missing.
    """
    raw = yaml.safe_load((folder / "specdec.yaml").read_text("utf-8"))
    attributes = _by_name((_defined(each) for each in raw["attributes"]), "key")
    groups = {each["id"]: each for each in raw["attribute_groups"]}
    if len(groups) < len(raw["attribute_groups"]):
        raise ValueError("two attribute groups have one id")
    metrics = _by_name(
        (
            Metric(
                each["name"],
                each["instrument"],
                each["unit"],
                each["brief"].strip(),
                each.get("note", "").strip(),
                each["annotations"]["code_generation"]["metric_value_type"],
                _referenced(each["name"], each["attributes"], attributes, groups),
            )
            for each in raw["metrics"]
        ),
        "name",
    )
    exemplar = _referenced("specdec.exemplar", groups["specdec.exemplar"]["attributes"], attributes, groups)
    manifest = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
    return Registry(attributes, metrics, exemplar, raw, manifest)


def _by_name(each: Iterable[Any], field: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in each:
        name = getattr(one, field)
        if name in found:
            raise ValueError(f"{name} is defined twice")
        found[name] = one
    return found


def _defined(raw: Mapping[str, Any]) -> Attribute:
    kind = raw["type"]
    members = (
        tuple((each["value"], each["brief"].strip()) for each in kind["members"]) if isinstance(kind, dict) else ()
    )
    return Attribute(
        raw["key"],
        kind if isinstance(kind, str) else _type_name(members[0][0]),
        raw["brief"].strip(),
        raw.get("note", "").strip(),
        tuple(raw["examples"]),
        members,
    )


def _type_name(value: object) -> str:
    return {str: "string", int: "int", bool: "boolean"}[type(value)]


def _referenced(
    owner: str, refs: Sequence[Mapping[str, Any]], attributes: Mapping[str, Attribute], groups: Mapping[str, Any]
) -> tuple[Attribute, ...]:
    found: list[Attribute] = []
    for ref in refs:
        if "ref_group" in ref:
            found += _referenced(owner, groups[ref["ref_group"]]["attributes"], attributes, groups)
        else:
            found.append(_refined(ref, attributes))
    keys = [attribute.key for attribute in found]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{owner} has an attribute twice: {keys}")
    return tuple(found)


def _refined(ref: Mapping[str, Any], attributes: Mapping[str, Attribute]) -> Attribute:
    key = ref["ref"]
    # What begins with our own name and is not defined here is a slip; all else is the dependency's.
    base = attributes[key] if key in attributes or key.startswith("specdec.") else Attribute(key)
    level = ref["requirement_level"]
    ((level, condition),) = level.items() if isinstance(level, dict) else [(level, "")]
    return Attribute(
        key,
        base.type,
        ref.get("brief", base.brief).strip(),
        ref.get("note", base.note).strip(),
        tuple(ref.get("examples", base.examples)),
        base.members,
        level,
        condition,
    )
