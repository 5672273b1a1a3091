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


# The labels are a closed set: whatever is put in, nothing else can come out

LABELS = {
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "specdec.method",
    "specdec.source",
    "specdec.engine.index",
    "specdec.process",
    "specdec.ratio_set",
    "specdec.position",
    "specdec.reason",
    "error.type",
    "otel.metric.overflow",
}
EXEMPLAR_LABELS = {"gen_ai.response.id", "specdec.choice", "gen_ai.conversation.id", "specdec.pick"}
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def named(of: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of this function or method in the package, and its module."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-len(of.split(".")) :] == of.split("."):
                yield module, node


def keys_of(tree: ast.AST, node: ast.AST, at: ast.AST) -> set[str]:
    """The keys that a mapping, or a tuple of pairs, is spelled with; what cannot be told stays as it is spelled.

    A variable is looked up in the function around `at`, an attribute and a function in the whole module.
    """
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return set().union(*(keys_of(tree, value, at) if key is None else {spelled(key)} for key, value in pairs))
    if isinstance(node, ast.Tuple) and node.elts and all(isinstance(each, ast.Tuple) for each in node.elts):
        return {spelled(pair.elts[0]) for pair in node.elts if isinstance(pair, ast.Tuple)}
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    around = [each for each in functions if at in ast.walk(each)] if isinstance(node, ast.Name) else [tree]
    found: list[ast.AST] = []
    for each in (each for scope in around for each in ast.walk(scope)):
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            found += [each.value for target in targets if ast.unparse(target) == ast.unparse(node)]
    if isinstance(node, ast.Call):
        bodies = [each for each in functions if each.name == ast.unparse(node.func)]
        found += [r.value for body in bodies for r in ast.walk(body) if isinstance(r, ast.Return) and r.value]
    return set().union(*(keys_of(tree, each, each) for each in found)) if found else {ast.unparse(node)}


def spelled(key: ast.expr) -> str:
    """The value of a constant of `names`; anything else as it is spelled."""
    if isinstance(key, ast.Attribute) and ast.unparse(key.value) == "names":
        return str(getattr(names, key.attr))
    return ast.unparse(key)


def test_every_series_is_made_of_documented_labels_and_nothing_else() -> None:
    calls = list(named("Series.of"))
    assert {module for module, _ in calls} == {"instrumentors.py", "sums.py", "tally.py"}
    overflow = [keys_of(TREES[module], call.args[1], call) for module, call in named("Series")]
    assert overflow == [{"otel.metric.overflow"}]
    assert set().union(*(keys_of(TREES[module], call.args[1], call) for module, call in calls), *overflow) == LABELS


def test_only_the_pool_adds_to_the_counters_and_only_one_module_makes_instruments() -> None:
    makers = {module for kind in ("counter", "up_down_counter", "histogram", "gauge", "observable_gauge",
                                  "observable_counter", "observable_up_down_counter")
              for module, _ in named(f"create_{kind}")}  # fmt: skip
    assert makers == {"instruments.py"}
    assert {module for module, _ in named("Instruments")} == {"sums.py"}
    adds = [ast.unparse(call) for module, call in named("add") if "_counters" in ast.unparse(call.func)]
    assert adds == ["self._counters[series.metric].add(value, dict(series.attributes), context=context)"]
    for signal in ("start_span", "start_as_current_span", "add_event", "set_attribute", "get_logger", "get_tracer"):
        assert [module for module, _ in named(signal)] == []


def test_an_exemplar_says_ids_and_why_it_was_picked_and_nothing_else() -> None:
    (function,) = (
        node
        for node in ast.walk(TREES["exemplars.py"])
        if isinstance(node, ast.FunctionDef) and node.name == "labels_of"
    )
    displays = [node for node in ast.walk(function) if isinstance(node, ast.Dict) and node.keys]
    assert set().union(*(keys_of(function, display, display) for display in displays)) == EXEMPLAR_LABELS
