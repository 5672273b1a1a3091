"""One PromQL query on an engine's own speculation metrics, rewritten for the recorded names of `specdec.rules.yml`.

The engines' metrics, from their sources: vLLM's counters (`vllm/v1/spec_decode/metrics.py`, `SpecDecodingProm`) and the
gauges of its first engine (`vllm/engine/metrics.py`, until 0.9); SGLang's gauges, each the mean of one log interval of
one scheduler, and its count of verify steps (`sglang/srt/observability/metrics_collector.py`). Ray Serve puts `ray_`
before a name and turns its colon into an underscore.

A quotient of an engine's counters becomes the quotient of the pooled sums, a gauge too, and a single counter its sum.
What has no counterpart raises `CannotRewriteError` with the reason; nothing is guessed. The parser is promql-parser
(extra `migrate`). Pure functions, no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

import promql_parser
from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    Expr,
    MatrixSelector,
    NumberLiteral,
    ParenExpr,
)

from otel_specdec import names
from otel_specdec.names import Metric

ACCEPTED: Final = "accepted"
PROPOSED: Final = "proposed"
VERIFY: Final = "verify"
EMITTED: Final = "emitted"
COMPLETION: Final = "completion"
BY_POSITION: Final = "accepted by position"

POSITION_RATE: Final = "position_accept_rate"

_COUNTERS: Final = {
    ("vllm", "spec_decode_num_accepted_tokens"): ACCEPTED,
    ("vllm", "spec_decode_num_draft_tokens"): PROPOSED,
    ("vllm", "spec_decode_num_drafts"): VERIFY,
    ("vllm", "spec_decode_num_emitted_tokens"): EMITTED,
    ("vllm", "spec_decode_num_accepted_tokens_per_pos"): BY_POSITION,
    ("sglang", "spec_verify_calls"): VERIFY,
    # No metric of speculation: only rewritten where it stands in a quotient with one.
    ("vllm", "generation_tokens"): COMPLETION,
    ("sglang", "generation_tokens"): COMPLETION,
}
_GAUGES: Final = {
    ("vllm", "spec_decode_draft_acceptance_rate"): names.ACCEPT_RATE,
    ("sglang", "spec_accept_rate"): names.ACCEPT_RATE,
    ("sglang", "spec_accept_length"): names.ACCEPTANCE_LENGTH,
}
_WITHOUT_COUNTERPART: Final = {
    ("vllm", "spec_decode_efficiency"): "it is relative to what k drafts could have given, and no counter knows k",
    ("sglang", "spec_num_steps"): "it is a setting of the engine, not a count; leave it where it is",
    ("sglang", "spec_num_draft_tokens"): "it is a setting of the engine, not a count; leave it where it is",
    ("sglang", "spec_cap_length"): "the cap of DSpark's verify window has no counter",
    ("sglang", "spec_block_accept_length"): "what a cap cut off was not verified, so it has no counter",
}
_NAME: Final = re.compile(r"\b(?:ray_)?(vllm|sglang)[:_]((?:spec_|generation_tokens)\w*)")

# What a counter is called once recorded (`collector/mixin/recording.py` makes the rules, and a test compares).
_RECORDED: Final = {
    ACCEPTED: (names.ACCEPT_RATE, "numerator", Metric.ACCEPTED),
    PROPOSED: (names.ACCEPT_RATE, "denominator", Metric.PROPOSED),
    VERIFY: (names.ACCEPTANCE_LENGTH, "denominator", Metric.VERIFY),
    EMITTED: (names.ACCEPTANCE_LENGTH, "numerator", Metric.EMITTED),
    COMPLETION: (names.TOKENS_PER_VERIFY, "numerator", Metric.COMPLETION),
    BY_POSITION: (POSITION_RATE, "numerator", Metric.POSITION_ACCEPTED),
}
_QUOTIENTS: Final = {
    (ACCEPTED, PROPOSED): names.ACCEPT_RATE,
    (EMITTED, VERIFY): names.ACCEPTANCE_LENGTH,
    (COMPLETION, VERIFY): names.TOKENS_PER_VERIFY,
    (BY_POSITION, VERIFY): POSITION_RATE,
}
_METRICS: Final = {**names.RATIOS, POSITION_RATE: (Metric.POSITION_ACCEPTED, Metric.POSITION_PROPOSED)}


def label(attribute: str) -> str:
    """Prometheus' label for an attribute that came by OTLP."""
    return attribute.replace(".", "_")


POOL: Final = (
    "job", "deployment_environment_name",
    *map(label, (names.PROVIDER, names.MODEL, names.METHOD, names.SOURCE)),
)  # fmt: skip
"""What the recorded sums are split by (and positions by their position too)."""

FILTERS: Final = {"model_name": label(names.MODEL), "position": label(names.POSITION)}
"""Labels of the engines' metrics whose values are those of ours. The others name a scrape, and ours came by OTLP."""

GROUPS: Final = {
    **FILTERS,
    "engine": label(names.ENGINE_INDEX),
    "dp_rank": label(names.ENGINE_INDEX),
    "instance": "instance",
    "job": "job",
}
"""Labels to group by: the values may differ (`instance` is `service.instance.id`), but they split alike."""

WINDOW: Final = "5m"
_WINDOW_S: Final = 300
_DASHBOARDS_OWN: Final = ("$__rate_interval", "$__interval", "${__rate_interval}", "${__interval}")


class CannotRewriteError(ValueError):
    """A query for which there is no pooled one; its text says why."""


@dataclass(frozen=True)
class Rewritten:
    """The new query, what differs from the old one in meaning, and the labels that have another name now."""

    query: str
    notes: tuple[str, ...]
    labels: Mapping[str, str]

    def has(self, name: str) -> bool:
        """Whether the new series may have a label: it is grouped by, or nothing is."""
        grouped = re.findall(r"\bby \(([^)]*)\)", self.query)
        if grouped:
            return any(name in re.split(r",\s*", names) for names in grouped)
        return name in (*POOL, label(names.POSITION)) and not re.search(r"\bsum\s*\(", self.query)


def asked(query: str) -> list[str]:
    """The engines' own speculation metrics that a text names, each once."""
    found = (match for match in _NAME.finditer(query) if match[2].startswith("spec_"))
    return list(dict.fromkeys(match[0] for match in found))


def rewrite(query: str, labels: Mapping[str, str] | None = None) -> Rewritten:
    """The pooled query for one that asks for an engine's own metrics.

    Args:
        query: PromQL as a dashboard holds it, Grafana's variables included.
        labels: further labels of the engine's metrics that ours have too, by name: to filter and group by.

    Raises:
        CannotRewriteError: there is no such query, or this text cannot be read.
    """
    return _Rewriting(query, labels or {}).result()


@dataclass(frozen=True)
class _Sum:
    """A counter of an engine, per second or as an increase, and what it is summed by: None is not at all."""

    counter: str
    engine: str
    function: str
    window: timedelta
    filters: tuple[tuple[str, str], ...]
    offset: str
    by: tuple[str, ...] | None = None
    averaged: bool = False

    @property
    def where(self) -> tuple[object, ...]:
        """Two of them can be divided where this is equal: all but the position, which only one of vLLM's has."""
        groups = None if self.by is None else frozenset(self.by) - {"position"}
        filters = frozenset(each for each in self.filters if each[0] != "position")
        return self.engine, self.window, filters, self.offset, groups

    @property
    def of_a_position(self) -> bool:
        """Whether it is not summed over the positions."""
        chosen = any(name == "position" and not condition.startswith("!") for name, condition in self.filters)
        return self.by is None or "position" in self.by or chosen


@dataclass(frozen=True)
class _Gauge:
    """A ratio that an engine has made itself."""

    ratio: str
    engine: str
    filters: tuple[tuple[str, str], ...]
    offset: str
    window: timedelta | None = None
    by: tuple[str, ...] | None = None


@dataclass
class _Aside:
    """What the parser cannot take, or would not print again as it was: Grafana's variables, and texts in quotes."""

    durations: dict[str, timedelta] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    _TEXT = re.compile(r""" "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | `[^`]*` """, re.VERBOSE | re.DOTALL)
    _DURATION = re.compile(r"(\[\s*|:\s*|\boffset\s+)(\$\w+|\$\{\w+\})(?=\s*[\]:)\s]|$)")
    _RANGE_S = 9_007_199_254
    """Stands for `$__range_s`, a number."""

    def hide(self, query: str) -> str:
        """The query with durations that nobody writes, and texts without anything to escape."""
        query = self._TEXT.sub(lambda match: self._text(match[0]), query)
        return self._DURATION.sub(lambda match: match[1] + promql_parser.display_duration(self._of(match[2])), query)

    def show(self, query: str) -> str:
        """A query as it was meant."""
        for name, duration in self.durations.items():
            query = query.replace(promql_parser.display_duration(duration), name)
        query = re.sub(r'"aside_(\d+)_"', lambda match: self.texts[int(match[1])], query)
        return query.replace(str(self._RANGE_S), "$__range_s")

    def name(self, duration: timedelta) -> str | None:
        """The variable that a duration stands for."""
        return next((name for name, hidden in self.durations.items() if hidden == duration), None)

    def seconds(self, duration: timedelta) -> str | None:
        """A duration in seconds; None for a variable that has no such number."""
        name = self.name(duration)
        if name is None:
            return f"{duration.total_seconds():g}"
        return str(self._RANGE_S) if name in ("$__range", "${__range}") else None

    def _of(self, name: str) -> timedelta:
        return self.durations.setdefault(name, timedelta(days=200, seconds=7 + len(self.durations)))

    def _text(self, literal: str) -> str:
        if literal not in self.texts:
            self.texts.append(literal)
        return f'"aside_{self.texts.index(literal)}_"'


class _Rewriting:
    """The work on one query."""

    def __init__(self, query: str, labels: Mapping[str, str]) -> None:
        self.query = query
        self.filters = {**FILTERS, **labels}
        self.groups = {**GROUPS, **labels}
        self.aside = _Aside()
        self.notes: dict[str, None] = {}

    def result(self) -> Rewritten:
        try:
            parsed = promql_parser.parse(self.aside.hide(self.query))
        except ValueError as error:
            raise CannotRewriteError(f"it cannot be read: {str(error).strip().splitlines()[0]}") from None
        new = promql_parser.transform(parsed, self._replace)
        query = self.aside.show(str(new.expr if isinstance(new, ParenExpr) else new))
        if left := asked(query):
            raise CannotRewriteError("; ".join(f"{name}: {self._why_left(name)}" for name in left))
        return Rewritten(query, tuple(self.notes), self.groups)

    def _replace(self, expr: Expr) -> Expr | None:
        if isinstance(expr, ParenExpr):
            inner = self._replace(expr.expr)
            return ParenExpr.parse(f"({inner})") if inner is not None and not isinstance(inner, ParenExpr) else inner
        if isinstance(expr, BinaryExpr):
            text = self._quotient(expr)
            if text is None and _matched_on(expr) and asked(str(expr)):
                raise CannotRewriteError(f"its sides are matched on {', '.join(_matched_on(expr))}: our labels differ")
            return promql_parser.parse(f"({text})") if text else None
        if isinstance(expr, Call) and expr.func.name == "clamp_min":
            return None
        if isinstance(expr, Call) and expr.func.name in ("label_replace", "label_join") and asked(str(expr)):
            raise CannotRewriteError(f"{expr.func.name} works on labels that ours have under other names")
        if (gauge := self._gauge(expr)) is not None:
            return promql_parser.parse(f"({self._of_gauge(gauge)})")
        if (one := self._sum(expr)) is not None and one.counter != COMPLETION:
            return promql_parser.parse(self._alone(one))
        return None

    def _why_left(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        key = (match[1], match[2].removesuffix("_total")) if match else ("", "")
        if key in _GAUGES:
            return "a gauge that is an average already: of its sum, its spread or its history nothing can be made"
        if key in _COUNTERS:
            return "a counter without rate() or increase() over a range, in a form that is not known here"
        return _WITHOUT_COUNTERPART.get(key, "not known here")

    # What stands there

    def _quotient(self, expr: BinaryExpr) -> str | None:
        """The text of a quotient of an engine's counters, with `1 +` before it or not."""
        if str(expr.op) == "+":
            for number, quotient in ((expr.lhs, expr.rhs), (expr.rhs, expr.lhs)):
                inner = _inside(quotient)
                if str(number) == "1" and isinstance(inner, BinaryExpr) and (pair := self._pair(inner)):
                    return self._untrimmed(*pair)
        if (pair := self._pair(expr)) is not None:
            return self._of_pair(*pair)
        if str(expr.op) != "/" or not isinstance(above := _inside(expr.lhs), BinaryExpr):
            return None
        if str(above.op) == "+":
            parts = {one.counter: one for side in (above.lhs, above.rhs) if (one := self._sum(side)) is not None}
            below = self._sum(expr.rhs)
            if parts.keys() == {ACCEPTED, VERIFY} and below is not None and below.counter == VERIFY:
                return self._untrimmed(parts[ACCEPTED], below)
        if str(above.op) == "*":  # 100 * a / b
            for number, side in ((above.lhs, above.rhs), (above.rhs, above.lhs)):
                if isinstance(number, NumberLiteral) and (pair := self._divided(side, expr.rhs)):
                    return f"{number} * ({self._of_pair(*pair)})"
        return None

    def _pair(self, expr: BinaryExpr) -> tuple[_Sum, _Sum] | None:
        return self._divided(expr.lhs, expr.rhs) if str(expr.op) == "/" else None

    def _divided(self, above: Expr, below: Expr) -> tuple[_Sum, _Sum] | None:
        one, other = self._sum(above), self._sum(below)
        if one is None or other is None or one.where != other.where:
            return None
        # At least one of them is about speculation.
        return None if one.counter == other.counter == COMPLETION else (one, other)

    def _sum(self, expr: Expr) -> _Sum | None:
        expr = _inside(expr)
        if isinstance(expr, AggregateExpr) and str(expr.op) in ("sum", "avg"):
            inner = self._sum(expr.expr)
            if inner is None:
                return None
            return replace(inner, by=self._by(expr), averaged=inner.averaged or str(expr.op) == "avg")
        if not isinstance(expr, Call) or expr.func.name not in ("rate", "irate", "increase"):
            return None
        matrix = expr.args[0]
        if not isinstance(matrix, MatrixSelector) or (key := _key(matrix.vector_selector.name)) not in _COUNTERS:
            return None
        selector = matrix.vector_selector
        function = "increase" if expr.func.name == "increase" else "rate"
        return _Sum(_COUNTERS[key], key[0], function, matrix.range, _filters(selector), _offset(selector))

    def _gauge(self, expr: Expr) -> _Gauge | None:
        expr = _inside(expr)
        if isinstance(expr, AggregateExpr) and str(expr.op) == "avg":
            inner = self._gauge(expr.expr)
            return replace(inner, by=self._by(expr)) if inner is not None else None
        if isinstance(expr, AggregateExpr) and self._gauge(expr.expr) is not None:
            raise CannotRewriteError(
                f"the {expr.op} of a gauge that is an average already; beside it, "
                "specdec:replica_acceptance_length:ratio_rate5m has the ratio of each replica"
            )
        window: timedelta | None = None
        selector = expr
        if isinstance(expr, Call) and expr.func.name == "avg_over_time" and isinstance(expr.args[0], MatrixSelector):
            window, selector = expr.args[0].range, expr.args[0].vector_selector
        if not isinstance(selector, promql_parser.VectorSelector) or (key := _key(selector.name)) not in _GAUGES:
            return None
        return _Gauge(_GAUGES[key], key[0], _filters(selector), _offset(selector), window)

    def _by(self, expr: AggregateExpr) -> tuple[str, ...]:
        if expr.modifier is None:
            return ()
        if expr.modifier.type != AggModifierType.By:
            raise CannotRewriteError("it groups with `without`, and our series have other labels: say `by`")
        return tuple(expr.modifier.labels)

    # What is put there

    def _untrimmed(self, accepted: _Sum, drafts: _Sum) -> str | None:
        """For `1 + accepted / drafts`."""
        if (accepted.counter, drafts.counter) != (ACCEPTED, VERIFY):
            return None
        self._note(
            "1 + accepted / drafts is emitted / verify now: it was taken before a stop cut the last block, so the new "
            "one is lower where answers are short"
        )
        return self._ratio(names.ACCEPTANCE_LENGTH, drafts)

    def _of_pair(self, above: _Sum, below: _Sum) -> str:
        ratio = _QUOTIENTS.get((above.counter, below.counter))
        if ratio is not None and (ratio != POSITION_RATE or above.of_a_position):
            return self._ratio(ratio, above)
        halves = [self._series(_RECORDED[one.counter], one) for one in (above, below)]
        return f"{halves[0]} / ({halves[1]} > 0)"

    def _of_gauge(self, gauge: _Gauge) -> str:
        self._note("it was an average of averages, and is a quotient of sums now")
        window = gauge.window or timedelta()
        one = _Sum(gauge.ratio, gauge.engine, "rate", window, gauge.filters, gauge.offset, gauge.by)
        return self._ratio(gauge.ratio, one)

    def _ratio(self, ratio: str, one: _Sum) -> str:
        """The recorded ratio, where that is what is asked for; else the quotient of its sums."""
        above, below = _METRICS[ratio]
        if one.by is None and self._window(one.window) is None:
            self._per_pool()
            self._said_window(one.window)
            return f"specdec:{ratio}:ratio_rate5m{self._selector(one)}{one.offset}"
        halves = (
            self._series((ratio, "numerator", above), one),
            self._series((ratio, "denominator", below), one),
        )
        return f"{halves[0]} / ({halves[1]} > 0)"

    def _alone(self, one: _Sum) -> str:
        if one.averaged:
            raise CannotRewriteError("an average over engines of a count: ask for the sum, or for a ratio")
        series = self._series(_RECORDED[one.counter], one)
        if one.function == "rate":
            return series
        if (seconds := self.aside.seconds(one.window)) is None:
            raise CannotRewriteError(
                f"an increase over {self.aside.name(one.window)}: what is recorded has windows of {WINDOW}, "
                "so ask for rate(), or for $__range"
            )
        return f"({series} * {seconds})"

    def _series(self, recorded: tuple[str, str, Metric], one: _Sum) -> str:
        """A recorded sum as it is grouped here, or the raw counter where it is split by what is not recorded."""
        ratio, half, metric = recorded
        name, window = f"specdec:{ratio}:{half}_rate5m", self._window(one.window)
        self._said_window(one.window)
        by = None if one.by is None else self._grouped(one.by, positions=ratio == POSITION_RATE)
        known = {*POOL, *([label(names.POSITION)] if ratio == POSITION_RATE else [])}
        if by is None or known.issuperset(by):
            series = f"{name}{self._selector(one)}"
            series = f"avg_over_time({series}[{window}]{one.offset})" if window else f"{series}{one.offset}"
        else:
            self._note(f"from the raw counters: no recorded name is split by {', '.join(sorted(set(by) - known))}")
            entering = "" if ratio == POSITION_RATE else f'{label(names.RATIO_SET)}=~"(.+,)?{ratio}(,.+)?"'
            selector = self._selector(one, entering)
            series = f"rate({label(metric.value)}_total{selector}[{window or WINDOW}]{one.offset})"
        if by is None:
            self._per_pool()
            return series
        return f"sum by ({', '.join(by)}) ({series})" if by else f"sum({series})"

    def _grouped(self, by: Sequence[str], *, positions: bool) -> list[str]:
        unknown = [name for name in by if name not in self.groups]
        if unknown:
            raise CannotRewriteError(
                f"grouped by {', '.join(unknown)}, which our series do not have; "
                "--label OLD=NEW names a label of ours that stands for it"
            )
        mapped = [self.groups[name] for name in by if positions or name != "position"]
        if "instance" in mapped:
            self._note("instance is the service.instance.id of the process, not the address of a scrape")
        return mapped

    def _selector(self, one: _Sum, entering: str = "") -> str:
        kept, left = [], []
        for name, condition in one.filters:
            if name in self.filters:
                kept.append(f"{self.filters[name]}{condition}")
            else:
                left.append(name)
        if left:
            self._note(
                f"no longer filtered by {', '.join(dict.fromkeys(left))}: in the engine's metrics these name a scrape, "
                "ours come by OTLP"
            )
        ours = [f'{label(names.PROVIDER)}="{one.engine}"', f'{label(names.SOURCE)}="{names.ENGINE}"']
        return f"{{{', '.join(filter(None, [entering, *ours, *kept]))}}}"

    def _window(self, window: timedelta) -> str | None:
        """The window to average over; None where the recorded one is meant."""
        name = self.aside.name(window)
        if name in _DASHBOARDS_OWN or (name is None and window.total_seconds() <= _WINDOW_S):
            return None
        return promql_parser.display_duration(window)

    def _said_window(self, window: timedelta) -> None:
        if window and self._window(window) is None and window.total_seconds() != _WINDOW_S:
            was = self.aside.name(window) or promql_parser.display_duration(window)
            self._note(f"windows of {WINDOW} in the place of {was}")

    def _per_pool(self) -> None:
        self._note("a series is a pool (job, environment, provider, model, method, source) and no longer an engine")

    def _note(self, text: str) -> None:
        self.notes[text] = None


def _inside(expr: Expr) -> Expr:
    """What is in parentheses, or kept from being a zero denominator by `> 0` or `clamp_min`."""
    while True:
        if isinstance(expr, ParenExpr):
            expr = expr.expr
        elif isinstance(expr, BinaryExpr) and str(expr.op) == ">" and str(expr.rhs) == "0":
            expr = expr.lhs
        elif isinstance(expr, Call) and expr.func.name == "clamp_min":
            expr = expr.args[0]
        else:
            return expr


def _matched_on(expr: BinaryExpr) -> list[str]:
    """The labels that the two sides are joined by, or that one hands to the other."""
    if expr.modifier is None:
        return []
    matching = expr.modifier.matching.labels if expr.modifier.matching is not None else []
    return [*matching, *(expr.modifier.group_labels or [])]


def _key(name: str | None) -> tuple[str, str]:
    match = _NAME.fullmatch(name or "")
    return (match[1], match[2].removesuffix("_total")) if match else ("", "")


def _filters(selector: promql_parser.VectorSelector) -> tuple[tuple[str, str], ...]:
    if selector.matchers.or_matchers:
        raise CannotRewriteError("its filters are joined by `or`")
    matchers: Iterable[promql_parser.Matcher] = selector.matchers.matchers
    return tuple((each.name, str(each).removeprefix(each.name)) for each in matchers)


def _offset(selector: promql_parser.VectorSelector) -> str:
    if selector.at is not None:
        raise CannotRewriteError("it is taken at a fixed time (@)")
    if selector.offset is None:
        return ""
    sign = "-" if selector.offset < timedelta() else ""
    return f" offset {sign}{promql_parser.display_duration(abs(selector.offset))}"
