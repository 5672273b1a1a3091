"""The registry in semconv/: the documentation shows it, the code and the collector emit it, and it keeps the rules."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.sdk.metrics.export import Gauge, Sum

from otel_specdec import (
    GenerationExemplarFilter,
    GenerationReport,
    SpecCounts,
    SpecDecRecorder,
    __version__,
    names,
    sums,
    views,
)
from otel_specdec.counts import ALL_RATIOS
from otel_specdec.engines import Increment, Picked, Taken
from otel_specdec.instrumentors import EngineSource
from otel_specdec.names import Metric
from otel_specdec.sums import Series, pool_for
from semconv import registry as registries
from semconv import tables
from semconv.policies import findings
from tests.unit.collected import Meter
from tests.unit.engine_stand_in import HandTally, description

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = registries.load()
OVERFLOW = "otel.metric.overflow"


# --- The documentation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_committed_tables_are_the_registry_s(page: Path) -> None:
    assert page.read_text("utf-8") == tables.pages()[page], "run make semconv"


def test_every_table_is_shown_and_each_mark_has_its_end() -> None:
    shown: set[str] = set()
    for page in tables.PAGES:
        text = page.read_text("utf-8")
        begun = re.findall(r"^<!-- semconv: ([a-z ]+) -->$", text, re.MULTILINE)
        assert len(begun) == len(re.findall(r"^<!-- end semconv -->$", text, re.MULTILINE)) > 0
        shown |= set(begun)
    assert shown == set(tables.TABLES)


# --- What is emitted --------------------------------------------------------------------------------------------------


class PickedTally(HandTally):
    """Its one generation finished, and is picked for exemplars with everything that one can say."""

    def take(self) -> Taken:
        taken = super().take()
        if taken.increments:  # without a trace, which leaves no room for all
            taken.picked = [
                Picked("id", 1_000_000_000, 0.5, taken.increments, choice="0.1", session_id="s", lowest_rate=0.7)
            ]
        return taken


class FrontEndTally(HandTally):
    """Two tokens that no client got."""

    def take(self) -> Taken:
        return Taken([Increment(SpecCounts(), trimmed=2)])


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """A provider into which everything was counted that there is: by an engine, a recorder, our own errors."""
    monkeypatch.setattr(sums, "MAX_ATTRIBUTE_SETS", 8)
    meter = Meter(views=views(), exemplar_filter=GenerationExemplarFilter())
    pool = pool_for(meter.provider)
    tally = PickedTally()
    source = EngineSource(description(provider="vllm"), tally, pool.process("engine-0"))
    pool.birth(source.expected())
    pool.attach(source)
    tally.put(3, 4, 2, 6, 5, generations=1, accepted_by_position=[2, 1], proposed_by_position=[2, 2])

    front_end = FrontEndTally()
    source = EngineSource(
        description(provider="vllm", index=None, role="api-0", front_end=True), front_end, pool.process("api-0")
    )
    pool.birth(source.expected())
    pool.attach(source)

    recorder = SpecDecRecorder(meter.provider)
    report = GenerationReport(
        "a", SpecCounts(3, 4, 2, 6, 5), provider="vllm", model="m", method="ngram", engine_index=0,
        accepted_by_position=[2, 1], proposed_by_position=[2, 2],
    )  # fmt: skip
    recorder.record(report)
    recorder.record(report)  # a duplicate
    recorder.record(GenerationReport("a", SpecCounts(9, 9, 9, 9, 9)))  # a conflict
    recorder.record("nothing that is a report")  # type: ignore[arg-type]  # that is the point: it is invalid
    recorder.record(GenerationReport("unknown", SpecCounts(1, 2, 1, 3, 2)))
    pool.error(RuntimeError("ours"), "testing")
    for metric in Metric:  # more attribute sets than there is room for
        pool.add([(Series.of(metric, {**_some(metric), "specdec.process": f"engine-{n}"}), 1) for n in range(9)])
    return meter


def _some(metric: Metric) -> dict[str, Any]:
    """Attributes of a point that is only to take room: the required ones."""
    return {
        attribute.key: attribute.members[0][0] if attribute.members else attribute.examples[0]
        for attribute in REGISTRY.metrics[metric.value].attributes
        if attribute.level == "required"
    }


def test_names_units_instruments_and_descriptions_are_registered_and_nothing_else_is(emitted: Meter) -> None:
    data: Any = emitted.reader.get_metrics_data()
    found = {}
    for metric in (m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics):
        kind = "counter" if isinstance(metric.data, Sum) and metric.data.is_monotonic else "other"
        kind = "gauge" if isinstance(metric.data, Gauge) else kind
        values = {type(point.value).__name__ for point in metric.data.data_points}
        found[metric.name] = (metric.unit, kind, metric.description, *values)
    assert found == {
        metric.name: (metric.unit, metric.instrument, metric.brief, metric.value_type) for metric in REGISTRY.counters
    }
    assert [metric.value for metric in Metric] == [metric.name for metric in REGISTRY.counters]


@pytest.mark.parametrize("metric", [metric.value for metric in Metric])
def test_points_have_the_registered_attributes_and_no_other(emitted: Meter, metric: str) -> None:
    registered = {attribute.key: attribute for attribute in REGISTRY.metrics[metric].attributes}
    required = {key for key, attribute in registered.items() if attribute.level == "required"}
    found = [point.attributes for point in emitted.points(metric)]
    assert {OVERFLOW: True} in found
    ordinary = [attributes for attributes in found if OVERFLOW not in attributes]
    for attributes in ordinary:
        assert required <= attributes.keys() <= registered.keys()
    for source in {attributes["specdec.source"] for attributes in ordinary}:  # each has all that it can have
        keys = {key for attributes in ordinary if attributes["specdec.source"] == source for key in attributes}
        assert keys == registered.keys() - {OVERFLOW}, source


def test_points_have_values_of_the_registered_type(emitted: Meter) -> None:
    python = {"string": str, "int": int, "boolean": bool}
    for point in emitted.points():
        for key, value in point.attributes.items():
            if key in REGISTRY.attributes:
                attribute = REGISTRY.attributes[key]
                assert type(value) is python[attribute.type], key
                if attribute.members:
                    assert value in {member for member, _ in attribute.members}, key


def test_exemplars_have_the_registered_attributes_and_only_they(emitted: Meter) -> None:
    registered = {attribute.key for attribute in REGISTRY.exemplar}
    found = [(point.name, set(each.filtered_attributes)) for point in emitted.points() for each in point.exemplars]
    assert {metric for metric, _ in found} == {metric.value for metric in with_ratio_set()}
    for _, keys in found:
        assert keys <= registered
    for metric in with_ratio_set():  # the engine's exemplar has all of them
        assert (metric.value, registered) in found


def test_every_attribute_name_of_the_code_is_registered_and_no_other() -> None:
    not_attributes = {names.DRAIN, names.METER, names.SCHEMA_URL, *(metric.value for metric in Metric)}
    spelled = {
        value
        for constant, value in vars(names).items()
        if constant.isupper() and isinstance(value, str) and "." in value and value not in not_attributes
    }
    registered = {a.key for a in REGISTRY.exemplar} | {a.key for m in REGISTRY.counters for a in m.attributes}
    assert spelled == registered
    assert REGISTRY.attributes.keys() <= registered


def test_values_that_are_counted_are_those_of_the_code() -> None:
    members = {key: {value for value, _ in each.members} for key, each in REGISTRY.attributes.items() if each.members}
    assert members == {
        names.SOURCE: {names.ENGINE, names.RESPONSE},
        names.REASON: {names.DUPLICATE, names.CONFLICT, names.INVALID},
        names.PICK: {names.LOWEST},
    }
    sets = {names.ratio_set(m, frozenset(s)) for m in with_ratio_set() for s in subsets(ALL_RATIOS)}
    assert set(REGISTRY.attributes[names.RATIO_SET].examples) <= sets


def with_ratio_set() -> set[Metric]:
    return {metric for metric in Metric if names.RATIO_SET in REGISTRY.metrics[metric.value].keys}


def subsets(whole: frozenset[str]) -> list[tuple[str, ...]]:
    return [subset for n in range(len(whole) + 1) for subset in itertools.combinations(sorted(whole), n)]


# --- The collector's gauges -------------------------------------------------------------------------------------------

PIPELINE = yaml.safe_load((ROOT / "collector/pipeline.yaml").read_text("utf-8"))["processors"]


def statements(processor: str, context: str) -> list[str]:
    return [
        s for each in PIPELINE[processor]["metric_statements"] if each["context"] == context for s in each["statements"]
    ]


def test_the_collector_s_gauges_are_registered_and_nothing_else_is() -> None:
    copies = [
        re.match(r'copy_metric\(name="([^"]+)", description="([^"]+)", unit="([^"]+)"\)', statement)
        for statement in statements("transform/halves", "metric")
    ]
    found = {match[1]: (match[3], match[2]) for match in copies if match}
    assert len(found) == len(copies)
    for rule in PIPELINE["metricsgeneration/ratios"]["rules"]:
        found[rule["name"]] = (rule["unit"], REGISTRY.metrics[rule["name"]].brief)  # the processor has no descriptions
    assert found == {metric.name: (metric.unit, metric.brief) for metric in REGISTRY.gauges}
    assert "convert_sum_to_gauge()" in statements("transform/sum", "metric")


@pytest.mark.parametrize("gauge", [metric.name for metric in REGISTRY.gauges])
def test_a_gauge_s_attributes_are_those_that_the_collector_puts_back(gauge: str) -> None:
    put = {
        match[1]
        for statement in statements("transform/sum", "datapoint")
        if (match := re.match(r'set\(datapoint\.attributes\["([^"]+)"\]', statement))
    }
    assert put == REGISTRY.metrics[gauge].keys
    assert {"gen_ai.request.model", "specdec.source"} <= put


# --- The registry itself ----------------------------------------------------------------------------------------------


def test_the_registry_keeps_weaver_s_policies() -> None:
    assert findings(REGISTRY.raw) == []


def test_the_manifest_names_this_version_and_the_schema_of_our_meter() -> None:
    assert REGISTRY.manifest["schema_url"].rpartition("/")[2] == __version__
    assert REGISTRY.manifest["stability"] == "development"
    (dependency,) = REGISTRY.manifest["dependencies"]
    assert dependency["schema_url"] == names.SCHEMA_URL
    assert f"/v{names.SCHEMA_URL.rpartition('/')[2]}." in dependency["registry_path"]
    assert REGISTRY.raw["file_format"] == "definition/2"


def test_everything_is_in_development() -> None:
    signals = [*REGISTRY.raw["attributes"], *REGISTRY.raw["metrics"]]
    assert {each["stability"] for each in signals} == {"development"}


def named(raw: Any, kind: str, name: str) -> Any:
    (found,) = [each for each in raw[kind] if name in (each.get("key"), each.get("name"), each.get("id"))]
    return found


def rename(kind: str, old: str, new: str) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        each = named(raw, kind, old)
        each["key" if kind == "attributes" else "name"] = new
        if kind == "attributes":
            for ref in (r for owner in (*raw["metrics"], *raw["attribute_groups"]) for r in owner["attributes"]):
                if ref.get("ref") == old:
                    ref["ref"] = new

    return change


def put(kind: str, name: str, **fields: Any) -> Callable[[Any], None]:
    return lambda raw: named(raw, kind, name).update(fields)


def drop(kind: str, name: str, field: str) -> Callable[[Any], None]:
    return lambda raw: named(raw, kind, name).pop(field)


def add_attribute(**fields: Any) -> Callable[[Any], None]:
    told = {"key": "specdec.old", "type": "int", "stability": "development", "brief": "Old.", "examples": [1]}
    return lambda raw: raw["attributes"].append({**told, **fields})


def add_group() -> Callable[[Any], None]:
    return lambda raw: raw["attribute_groups"].append({"id": "g", "visibility": "internal", "attributes": []})


def member(**fields: str) -> Callable[[Any], None]:
    return lambda raw: named(raw, "attributes", "specdec.reason")["type"]["members"][0].update(fields)


RENAMED = {"reason": "renamed", "renamed_to": "specdec.position"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename("metrics", "specdec.generations", "specdec.position"), "is the namespace of"),
        (rename("attributes", "specdec.position", "specdec.engine"), "is the namespace of"),
        (rename("attributes", "specdec.position", "specdec.engine_index"), "one constant"),
        (rename("metrics", "specdec.generations", "specdec.Generations"), "lower-case"),
        (rename("metrics", "specdec.generations", "generations"), "no namespace"),
        (rename("metrics", "specdec.generations", "specdec.generations_total"), "appends"),
        (rename("attributes", "specdec.position", "specdec.positions"), "plural"),
        (put("attributes", "specdec.position", type="int[]"), "plural"),
        (put("metrics", "specdec.generations", unit="generations"), "no unit"),
        (put("metrics", "specdec.generations", unit="{generations}"), "singular"),
        (put("metrics", "specdec.generations", instrument="sum"), "no instrument"),
        (drop("metrics", "specdec.generations", "requirement_level"), "unasked"),
        (put("metrics", "specdec.generations", brief="Generations"), "no brief"),
        (put("attributes", "specdec.position", brief=""), "no brief"),
        (put("attributes", "specdec.position", stability="soon"), "no stability"),
        (drop("attributes", "specdec.position", "examples"), "no examples"),
        (put("attributes", "specdec.position", examples=["0"]), "another type"),
        (put("attributes", "specdec.position", examples=[True]), "another type"),
        (member(value="invalid"), "two members"),
        (member(id="Dup"), "bad id"),
        (put("attributes", "specdec.position", deprecated={"reason": "obsoleted"}), "without a word"),
        (put("attributes", "specdec.position", deprecated={"reason": "gone", "note": "It is."}), "without a word"),
        (add_attribute(deprecated={"reason": "renamed", "renamed_to": "specdec.nothing"}), "renamed to nothing"),
        (add_attribute(deprecated=RENAMED, type="string", examples=["1"]), "something else"),
        (add_attribute(), "used nowhere"),
        (add_group(), "used nowhere"),
        (put("metrics", "specdec.generations", attributes=[{"ref_group": "attributes.none"}]), "which there is not"),
        (put("metrics", "specdec.generations", attributes=[{"ref": "specdec.position"}]), "no requirement level"),
        (
            put("metrics", "specdec.generations", attributes=[
                {"ref": "specdec.position", "requirement_level": {"conditionally_required": " "}}
            ]),
            "which condition",
        ),
        (
            put("metrics", "specdec.generations", attributes=[{"ref": "server.port", "requirement_level": "opt_in"}]),
            "defined elsewhere",
        ),
    ],
)  # fmt: skip
def test_each_policy_finds_what_it_is_for(change: Callable[[Any], None], says: str) -> None:
    raw = copy.deepcopy(dict(REGISTRY.raw))
    change(raw)
    found = findings(raw)
    assert any(says in finding for finding in found), found


def test_an_attribute_that_was_renamed_with_a_successor_of_its_kind_is_in_order() -> None:
    raw = copy.deepcopy(dict(REGISTRY.raw))
    add_attribute(deprecated=RENAMED)(raw)
    assert findings(raw) == []


# --- Reading it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("name: specdec.proposed_tokens", "name: specdec.accepted_tokens", ValueError),
        ("ref: specdec.ratio_set", "ref: specdec.ratio_sets", KeyError),
        ("ref: specdec.ratio_set", "ref: specdec.source", ValueError),
        ("key: specdec.choice", "key: specdec.position", ValueError),
        ("id: attributes.specdec.rank", "id: attributes.specdec.pool", ValueError),
    ],
)
def test_a_registry_that_contradicts_itself_is_refused(
    tmp_path: Path, old: str, new: str, error: type[Exception]
) -> None:
    text = (registries.FOLDER / "specdec.yaml").read_text("utf-8")
    assert old in text
    (tmp_path / "specdec.yaml").write_text(text.replace(old, new, 1))
    (tmp_path / "manifest.yaml").write_text("{}")
    with pytest.raises(error):
        registries.load(tmp_path)
