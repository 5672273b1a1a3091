from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import otel_specdec
from otel_specdec import names
from otel_specdec.names import RATIOS, Metric, ratio_set
from tests.unit.collected import Meter, points

PACKAGE = Path(otel_specdec.__file__).parent

COUNTERS = {
    "specdec.accepted_tokens": "{token}",
    "specdec.proposed_tokens": "{token}",
    "specdec.verify_steps": "{step}",
    "specdec.completion_tokens": "{token}",
    "specdec.emitted_tokens": "{token}",
    "specdec.generations": "{generation}",
    "specdec.position.accepted_tokens": "{token}",
    "specdec.position.proposed_tokens": "{token}",
    "specdec.trimmed_tokens": "{token}",
    "specdec.dropped_reports": "{report}",
    "specdec.instrumentation.errors": "{error}",
}


def test_the_counters_are_those_of_the_contract() -> None:
    assert {metric.value: metric.unit for metric in Metric} == COUNTERS


def test_every_counter_is_an_integer_monotonic_sum_with_a_description() -> None:
    from otel_specdec.sums import Series, pool_for

    meter = Meter()
    pool_for(meter.provider).add((Series.of(metric, {}), 1) for metric in Metric)
    data = meter.reader.get_metrics_data()
    assert data is not None
    (scope,) = (scope for resource in data.resource_metrics for scope in resource.scope_metrics)
    assert {metric.name: metric.unit for metric in scope.metrics} == COUNTERS
    for metric in scope.metrics:
        assert metric.data.is_monotonic  # type: ignore[union-attr]  # a Sum
        assert metric.description
    assert all(type(point.value) is int for point in points(data))


def test_there_is_one_meter_with_the_package_s_version_and_a_pinned_schema() -> None:
    from otel_specdec.sums import Series, pool_for

    meter = Meter()
    pool_for(meter.provider).add([(Series.of(Metric.ERRORS, {}), 1)])
    data = meter.reader.get_metrics_data()
    assert data is not None
    (scope,) = (each.scope for resource in data.resource_metrics for each in resource.scope_metrics)
    assert (scope.name, scope.version) == ("otel_specdec", otel_specdec.__version__)
    assert scope.schema_url == "https://opentelemetry.io/schemas/1.37.0"


def test_the_attributes_are_those_of_the_contract() -> None:
    assert names.PROVIDER == "gen_ai.provider.name"
    assert names.MODEL == "gen_ai.request.model"
    assert names.METHOD == "specdec.method"
    assert names.SOURCE == "specdec.source"
    assert names.ENGINE_INDEX == "specdec.engine.index"
    assert names.PROCESS == "specdec.process"
    assert names.RATIO_SET == "specdec.ratio_set"
    assert names.POSITION == "specdec.position"
    assert names.REASON == "specdec.reason"
    assert names.ERROR_TYPE == "error.type"
    assert (names.ENGINE, names.RESPONSE) == ("engine", "response")
    assert (names.DUPLICATE, names.CONFLICT, names.INVALID) == ("duplicate", "conflict", "invalid")


def test_no_metric_name_is_another_s_namespace() -> None:
    for one, other in itertools.permutations(COUNTERS, 2):
        assert not other.startswith(f"{one}.")


def test_each_ratio_is_a_quotient_of_two_counters() -> None:
    assert {ratio: (above.value, below.value) for ratio, (above, below) in RATIOS.items()} == {
        "acceptance_length": ("specdec.emitted_tokens", "specdec.verify_steps"),
        "accept_rate": ("specdec.accepted_tokens", "specdec.proposed_tokens"),
        "tokens_per_verify": ("specdec.completion_tokens", "specdec.verify_steps"),
    }
    assert next(iter(RATIOS)) == "acceptance_length"


# What each counter may name; `specdec.generations` all three.
HALVES = {
    Metric.ACCEPTED: ["accept_rate"],
    Metric.PROPOSED: ["accept_rate"],
    Metric.COMPLETION: ["tokens_per_verify"],
    Metric.EMITTED: ["acceptance_length"],
    Metric.VERIFY: ["acceptance_length", "tokens_per_verify"],
    Metric.GENERATIONS: ["accept_rate", "acceptance_length", "tokens_per_verify"],
}


@pytest.mark.parametrize("metric", HALVES)
def test_a_point_names_the_ratios_that_its_counter_is_a_half_of(metric: Metric) -> None:
    ratios = ("accept_rate", "acceptance_length", "tokens_per_verify")
    for holding in itertools.chain.from_iterable(itertools.combinations(ratios, n) for n in range(4)):
        expected = ",".join(ratio for ratio in HALVES[metric] if ratio in holding) or "none"
        assert ratio_set(metric, frozenset(holding)) == expected


@pytest.mark.parametrize(
    ("metric", "holding", "value"),
    [
        (Metric.GENERATIONS, RATIOS, "accept_rate,acceptance_length,tokens_per_verify"),
        (Metric.VERIFY, RATIOS, "acceptance_length,tokens_per_verify"),
        (Metric.VERIFY, ("accept_rate",), "none"),
        (Metric.ACCEPTED, RATIOS, "accept_rate"),
        (Metric.EMITTED, (), "none"),
    ],
)
def test_a_ratio_set_is_sorted_and_joined_by_commas(metric: Metric, holding: tuple[str, ...], value: str) -> None:
    assert ratio_set(metric, frozenset(holding)) == value


@pytest.mark.parametrize("module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_spelled_in_one_module_only(module: Path) -> None:
    if module == PACKAGE / "names.py":
        return
    spelled = [
        text
        for text in strings(ast.parse(module.read_text()))
        if text in RATIOS or re.search(r"(?<![\w.])specdec\.|gen_ai\.|otel\.metric\.|error\.type", text)
    ]
    assert spelled == []


def strings(tree: ast.AST) -> Iterator[str]:
    """String literals outside docstrings and annotations; an f-string's literal parts one by one."""
    ignored: set[int] = set()
    for node in ast.walk(tree):
        # Docstrings, those after an assignment too: a string that is a statement is no value.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            ignored.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            yield node.value
