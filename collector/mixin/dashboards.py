"""The Grafana dashboard, on recorded names: it works the same on either rule file, and a panel costs next to nothing.

The one raw name is in the target that fetches exemplars: exemplars belong to the series that they came with, and a
recorded series has none. Grafana asks for the exemplars of every selector in a query, so that query compares with -1
and
draws no line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import bargauge, dashboard, stat, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import prometheus as prometheus_builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, prometheus
from grafana_foundation_sdk.models import dashboard as models

from collector.mixin.prometheus_names import (
    ERROR_TYPE,
    MODEL,
    POSITION,
    PROVIDER,
    REASON,
    SOURCE,
    VERSION,
    counter,
)
from otel_specdec import names
from otel_specdec.names import Metric

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
POOLS = f'job=~"$job", {MODEL}=~"$model", {SOURCE}=~"$source"'
NO_JOB = f'{MODEL}=~"$model"'
"""For the reconciliation, which has no job: ours and the engine's own come from different ones."""
JOB = 'job=~"$job"'

LENGTH = f"specdec:{names.ACCEPTANCE_LENGTH}"
RATE = f"specdec:{names.ACCEPT_RATE}"


@dataclass(frozen=True)
class Query:
    """One line, or several: an expression and what to call its series."""

    expr: str
    legend: str
    exemplars: bool = False


@dataclass(frozen=True)
class Shown:
    """One panel. `unit` is Grafana's."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    low: float | None = None
    high: float | None = None
    decimals: float | None = None


@dataclass(frozen=True)
class Section:
    """A row."""

    title: str
    panels: Sequence[Shown] = field(default_factory=tuple)


def of(name: str, more: str = "") -> str:
    """A recorded name, narrowed by the dashboard's variables."""
    return f"{name}{{{POOLS}{', ' + more if more else ''}}}"


def pooled(ratio: str) -> str:
    """The ratio of everything that is selected: sums first, then the quotient, and never over the source."""
    above = f"sum by ({SOURCE}) ({of(f'specdec:{ratio}:numerator_rate5m')})"
    below = f"sum by ({SOURCE}) ({of(f'specdec:{ratio}:denominator_rate5m')})"
    return f"{above} / ({below} > 0)"


def engines_of(name: str) -> str:
    """A recorded sum over all services, of engines only: what the engines' own metrics can be held against."""
    return f'sum by ({PROVIDER}, {MODEL}) ({name}{{{NO_JOB}, {SOURCE}="{names.ENGINE}"}})'


POOL_LEGEND = f"{{{{{MODEL}}}}} {{{{specdec_method}}}} {{{{{SOURCE}}}}} ({{{{job}}}})"
TOKENS_PER_STEP = "Tokens that a verify step of the target model emits, bonus token included, after trimming."

SECTIONS = [
    Section(
        "Everything selected",
        [
            Shown(
                "Acceptance length", TOKENS_PER_STEP + " 1 is what no speculation at all would give.",
                [Query(pooled(names.ACCEPTANCE_LENGTH), f"{{{{{SOURCE}}}}}")],
                kind="stat", width=6, height=4, decimals=2,
            ),
            Shown(
                "Accept rate", "Accepted draft tokens of the proposed ones.",
                [Query(pooled(names.ACCEPT_RATE), f"{{{{{SOURCE}}}}}")], "percentunit", "stat", 6, 4, decimals=1,
            ),
            Shown(
                "Coverage of the acceptance length", "The share of finished generations that it speaks for.",
                [
                    Query(
                        f"sum by ({SOURCE}) ({of(f'{LENGTH}:covered_rate5m')})"
                        f" / (sum by ({SOURCE}) ({of('specdec:generations:rate5m')}) > 0)",
                        f"{{{{{SOURCE}}}}}",
                    )
                ],
                "percentunit", "stat", 6, 4, decimals=1,
            ),
            Shown(
                "Target passes avoided", "Emitted tokens less verify steps, a second: passes that speculation saved.",
                [Query(f"sum by ({SOURCE}) ({of('specdec:target_passes_avoided:rate5m')})", f"{{{{{SOURCE}}}}}")],
                kind="stat", width=6, height=4, decimals=1,
            ),
        ],
    ),
    Section(
        "Ratios of each pool",
        [
            Shown(
                "Acceptance length over time",
                TOKENS_PER_STEP + """ The one to look at first: it compares across engines. Dots are single
                generations: their
                id is the response id that the client got, their trace is the request's.""",
                [
                    Query(of(f"{LENGTH}:ratio_rate5m"), POOL_LEGEND),
                    Query(f"{of(counter(Metric.EMITTED))} < -1", "", exemplars=True),
                ],
                width=12, height=9, low=1, decimals=2,
            ),
            Shown(
                "Accept rate over time", "Accepted draft tokens of the proposed ones, generations with both known.",
                [Query(of(f"{RATE}:ratio_rate5m"), POOL_LEGEND)], "percentunit", width=12, height=9, low=0, high=1,
            ),
            Shown(
                "Tokens per verify step",
                """Completion tokens of each verify step. Steps without drafts add tokens and no verify step, so with
                n-gram
                on vLLM it has no upper bound k + 1: compare it with nothing but itself.""",
                [Query(of(f"specdec:{names.TOKENS_PER_VERIFY}:ratio_rate5m"), POOL_LEGEND)], low=0, decimals=2,
            ),
            Shown(
                "Coverage", "The share of finished generations that each ratio speaks for.",
                [Query(of("specdec:coverage:ratio_rate5m"), f"{{{{ratio}}}}: {POOL_LEGEND}")],
                "percentunit", low=0, high=1,
            ),
            Shown(
                "Finished generations", "A second, by pool.",
                [Query(of("specdec:generations:rate5m"), POOL_LEGEND)], low=0,
            ),
        ],
    ),
    Section(
        "How far to draft",
        [
            Shown(
                "Accept rate by position", "Accepted of proposed draft tokens at each position of the draft, from 0.",
                [Query(of("specdec:position_accept_rate:ratio_rate5m"), f"{{{{{POSITION}}}}}: {POOL_LEGEND}")],
                "percentunit", width=8, low=0, high=1,
            ),
            Shown(
                "Acceptance length for every k",
                """What num_speculative_tokens = k would have given, from the positions of what was drafted: a k that
                is no
                larger than today's. Where it flattens, the rest is waste. Before trimming at a generation's end.""",
                [Query(of("specdec:best_k_acceptance_length:ratio_rate5m"), f"k = {{{{k}}}}: {POOL_LEGEND}")],
                kind="bargauge", width=8, low=1, decimals=2,
            ),
            Shown(
                "Draft tokens wasted", "Drafted, verified and thrown away, a second; and their share of all drafts.",
                [
                    Query(of("specdec:draft_tokens_wasted:rate5m"), POOL_LEGEND),
                    Query(
                        f"{of('specdec:draft_tokens_wasted:rate5m')} / ({of(f'{RATE}:denominator_rate5m')} > 0)",
                        f"share: {POOL_LEGEND}",
                    ),
                ],
                low=0,
            ),
            Shown(
                "Target passes avoided by pool", "Emitted tokens less verify steps, a second.",
                [Query(of("specdec:target_passes_avoided:rate5m"), POOL_LEGEND)], low=0,
            ),
        ],
    ),
    Section(
        "Replicas",
        [
            Shown(
                "Replicas reporting", "Engines and recorders that exported within five minutes.",
                [Query(of("specdec:replicas:count"), POOL_LEGEND)], low=0, decimals=0,
            ),
            Shown(
                "Acceptance length by replica",
                "To find the one that is different. Never average these: they are quotients.",
                [Query(of("specdec:replica_acceptance_length:ratio_rate5m"), "{{instance}} {{specdec_process}}")],
                low=1, decimals=2,
            ),
            Shown(
                "Finished generations by replica",
                "A second. One at 0 among others that are not hangs, or gets no traffic.",
                [Query(of("specdec:replica_generations:rate5m"), "{{instance}} {{specdec_process}}")], low=0,
            ),
        ],
    ),
    Section(
        "Before and after a release",
        [
            Shown(
                "Acceptance length by service.version", "Both at once while a release rolls out.",
                [
                    Query(
                        of("specdec:version_acceptance_length:ratio_rate5m"), f"{{{{{VERSION}}}}}: {POOL_LEGEND}",
                    )
                ],
                width=12, low=1, decimals=2,
            ),
            Shown(
                "Accept rate by service.version", "Both at once while a release rolls out.",
                [Query(of("specdec:version_accept_rate:ratio_rate5m"), f"{{{{{VERSION}}}}}: {POOL_LEGEND}")],
                "percentunit", width=12, low=0, high=1,
            ),
        ],
    ),
    Section(
        "Beside the engines' own metrics",
        [
            Shown(
                "Acceptance length: ours and the engine's own",
                """vLLM's is 1 + accepted / drafts, before trimming: above ours where generations are short. SGLang's
                is an
                average of gauges.""",
                [
                    Query(
                        f"{engines_of(f'{LENGTH}:numerator_rate5m')}"
                        f" / ({engines_of(f'{LENGTH}:denominator_rate5m')} > 0)",
                        f"ours: {{{{{PROVIDER}}}}} {{{{{MODEL}}}}}",
                    ),
                    Query(
                        f"specdec:engine_acceptance_length:ratio_rate5m{{{NO_JOB}}}",
                        f"its own: {{{{{PROVIDER}}}}} {{{{{MODEL}}}}}",
                    ),
                ],
                low=1, decimals=2,
            ),
            Shown(
                "Tokens: ours and the engine's own", "Tokens a second, by counter.",
                [
                    Query(f"specdec:own_tokens:rate5m{{{NO_JOB}}}", f"ours: {{{{counter}}}} {{{{{MODEL}}}}}"),
                    Query(f"specdec:engine_tokens:rate5m{{{NO_JOB}}}", f"its own: {{{{counter}}}} {{{{{MODEL}}}}}"),
                ],
                low=0,
            ),
            Shown(
                "Difference", "Ours less the engine's own, tokens a second.",
                [Query(f"specdec:reconciliation:difference_rate5m{{{NO_JOB}}}", f"{{{{counter}}}} {{{{{MODEL}}}}}")],
            ),
        ],
    ),
    Section(
        "What went wrong",
        [
            Shown(
                "Dropped reports", "Reports that a recorder did not count, a second, by reason.",
                [Query(f"specdec:dropped_reports:rate5m{{{JOB}}}", f"{{{{{REASON}}}}} ({{{{job}}}})")], width=12, low=0,
            ),
            Shown(
                "Instrumentation errors", "Failures of the instrumentation, a second; serving is not affected.",
                [Query(f"specdec:instrumentation_errors:rate5m{{{JOB}}}", f"{{{{{ERROR_TYPE}}}}} ({{{{job}}}})")],
                width=12, low=0,
            ),
        ],
    ),
]  # fmt: skip


def _target(query: Query, ref: str, *, instant: bool) -> prometheus_builders.Dataquery:
    target = (
        prometheus_builders.Dataquery()
        .datasource(DATASOURCE)
        .expr(query.expr)
        .ref_id(ref)
        .editor_mode(prometheus.QueryEditorMode.CODE)
    )
    if query.legend:
        target.legend_format(query.legend)
    if query.exemplars:
        target.exemplar(True)
    return target.instant() if instant else target.range()


def _panel(shown: Shown) -> Any:
    panel: Any = {"timeseries": timeseries.Panel, "stat": stat.Panel, "bargauge": bargauge.Panel}[shown.kind]()
    panel.title(shown.title).description(" ".join(shown.description.split())).datasource(DATASOURCE)
    panel.unit(shown.unit).span(shown.width).height(shown.height)
    for setting, value in (("min", shown.low), ("max", shown.high), ("decimals", shown.decimals)):
        if value is not None:
            getattr(panel, setting)(value)
    if shown.kind == "timeseries":
        panel.line_width(1).fill_opacity(5).show_points(common.VisibilityMode.NEVER)
        panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        panel.legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
    if shown.kind == "bargauge":
        panel.orientation(common.VizOrientation.HORIZONTAL)
    for number, query in enumerate(shown.queries):
        panel.with_target(_target(query, chr(ord("A") + number), instant=shown.kind == "bargauge"))
    return panel


def _variable(name: str, label: str, of_label: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values(specdec:generations:rate5m, {of_label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def speculative_decoding() -> dashboard.Dashboard:
    """The one dashboard."""
    built = (
        dashboard.Dashboard("Speculative decoding")
        .uid("otel-specdec")
        .description("Pooled ratios of speculative decoding, from the specdec.* counters. Written by `make mixin`.")
        .tags(["llm", "speculative-decoding", "opentelemetry"])
        .time("now-3h", "now")
        .refresh("1m")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("job", "Service", "job"))
        .with_variable(_variable("model", "Model", MODEL))
        .with_variable(_variable("source", "Counted by", SOURCE))
    )
    for section in SECTIONS:
        built.with_row(dashboard.Row(section.title))
        for shown in section.panels:
            built.with_panel(_panel(shown))
    return built


def files() -> dict[str, str]:
    """Each dashboard's JSON by file name."""
    return {"specdec.json": JSONEncoder(sort_keys=True, indent=2).encode(speculative_decoding().build()) + "\n"}
