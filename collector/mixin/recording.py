"""The recording rules: raw counters to sums of pools to quotients, and the same names from the collector's gauges.

Every ratio: `rate` per series, then `sum`, then the quotient. A rate first, because a restart of one replica is a reset
of its own series only; the quotient last, because an average of ratios weighs a short window like a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

from collector.mixin.prometheus_names import (
    ERROR_TYPE,
    MODEL,
    POOL,
    POSITION,
    PROVIDER,
    RATIOS,
    REASON,
    REPLICA,
    SOURCE,
    VERSION,
    counter,
    entering,
    label,
)
from collector.mixin.yaml_files import Group, Rule, rule_file
from otel_specdec import names
from otel_specdec.names import Metric

WINDOW = "5m"
WINDOW_S = 300
EXACT_WINDOW = "1m"
EXACT_OFFSET = "30s"

BY_VERSION = (*POOL, VERSION)
RATIOS_BY_VERSION = (names.ACCEPTANCE_LENGTH, names.ACCEPT_RATE)


def summed(by: Sequence[str], inner: str) -> str:
    """`inner`, summed over everything but `by`."""
    return f"sum by ({', '.join(by)}) (\n  {inner}\n)"


def quotient(numerator: str, denominator: str) -> str:
    """A ratio that does not exist where its denominator is zero: never 0, NaN or Inf."""
    return f"{numerator} / ({denominator} > 0)"


def _rate(series: str) -> str:
    return f"rate({series}[{WINDOW}])"


def pool_rules() -> list[Rule]:
    """Numerators, denominators, generations and covered generations, from the raw counters."""
    rules = []
    for ratio, (above, below) in names.RATIOS.items():
        rules += [
            Rule(f"specdec:{ratio}:numerator_rate5m", summed(POOL, _rate(entering(above, ratio)))),
            Rule(f"specdec:{ratio}:denominator_rate5m", summed(POOL, _rate(entering(below, ratio)))),
        ]
    rules.append(Rule("specdec:generations:rate5m", summed(POOL, _rate(counter(Metric.GENERATIONS)))))
    for position, ratio in enumerate(RATIOS):
        rules.append(
            Rule(
                f"specdec:{ratio}:covered_rate5m",
                f"{summed(POOL, _rate(entering(Metric.GENERATIONS, ratio)))}\nor 0 * specdec:generations:rate5m",
                why="Generations finished and none of them has the pair: that is a real 0." if not position else "",
            )
        )
    return rules


def pool_rules_from_gauges() -> list[Rule]:
    """The same from the collector's gauges, each of which is a sum over one of its windows."""

    def per_second(gauge: str) -> str:
        return summed(POOL, f"sum_over_time({gauge}[{WINDOW}])") + f" / {WINDOW_S}"

    rules = []
    for ratio in RATIOS:
        rules += [
            Rule(f"specdec:{ratio}:numerator_rate5m", per_second(f"specdec_pool_numerator_{ratio}")),
            Rule(f"specdec:{ratio}:denominator_rate5m", per_second(f"specdec_pool_denominator_{ratio}")),
        ]
    rules.append(Rule("specdec:generations:rate5m", per_second("specdec_pool_generations")))
    for position, ratio in enumerate(RATIOS):
        rules.append(
            Rule(
                f"specdec:{ratio}:covered_rate5m",
                f"{per_second(f'specdec_pool_covered_{ratio}')}\nor 0 * specdec:generations:rate5m",
                why="Generations finished and none of them has the pair: that is a real 0." if not position else "",
            )
        )
    return rules


def ratio_rules() -> list[Rule]:
    """The ratios, their coverage, and what speculation costs and saves: quotients and differences of recorded sums."""
    rules = [
        Rule(
            f"specdec:{ratio}:ratio_rate5m",
            quotient(f"specdec:{ratio}:numerator_rate5m", f"specdec:{ratio}:denominator_rate5m"),
            why={
                names.ACCEPTANCE_LENGTH: """Tokens that a verify step emits. The one to look at first: it compares
                across engines.""",
                names.TOKENS_PER_VERIFY: """Steps without drafts add completion and no verify step, so with n-gram on
                vLLM this has
                no upper bound k + 1. It compares with nothing but itself.""",
            }.get(ratio, ""),
        )
        for ratio in RATIOS
    ]
    rules += [
        Rule(
            "specdec:coverage:ratio_rate5m",
            quotient(f"specdec:{ratio}:covered_rate5m", "specdec:generations:rate5m"),
            labels={"ratio": ratio},
            why="" if position else "The share of finished generations that a ratio speaks for.",
        )
        for position, ratio in enumerate(RATIOS)
    ]
    accept_rate, acceptance_length = names.ACCEPT_RATE, names.ACCEPTANCE_LENGTH
    rules += [
        Rule(
            "specdec:draft_tokens_wasted:rate5m",
            f"specdec:{accept_rate}:denominator_rate5m - specdec:{accept_rate}:numerator_rate5m",
            why="Draft tokens that were computed, verified and thrown away.",
        ),
        Rule(
            "specdec:target_passes_avoided:rate5m",
            f"specdec:{acceptance_length}:numerator_rate5m - specdec:{acceptance_length}:denominator_rate5m",
            why="A verify step is one pass of the target model; without drafts each of its tokens would be one.",
        ),
    ]
    return rules


def position_rules() -> list[Rule]:
    """Accept rate by draft position, and the acceptance length that every smaller k would have given."""
    by = (*POOL, POSITION)
    accepted, proposed = (f"specdec:position_accept_rate:{half}_rate5m" for half in ("numerator", "denominator"))
    rules = [
        Rule(accepted, summed(by, _rate(counter(Metric.POSITION_ACCEPTED)))),
        Rule(proposed, summed(by, _rate(counter(Metric.POSITION_PROPOSED)))),
        Rule("specdec:position_accept_rate:ratio_rate5m", quotient(accepted, proposed)),
    ]
    for k in range(1, names.MAX_POSITIONS + 1):
        below = "|".join(str(position) for position in range(k))
        rules.append(
            Rule(
                "specdec:best_k_acceptance_length:ratio_rate5m",
                f'1 + sum without ({POSITION}) ({accepted}{{{POSITION}=~"{below}"}})\n'
                f'  / (sum without ({POSITION}) ({proposed}{{{POSITION}="0"}}) > 0)\n'
                f'and sum without ({POSITION}) ({proposed}{{{POSITION}="{k - 1}"}}) > 0',
                labels={"k": str(k)},
                why="""What num_speculative_tokens = k would have given, before trimming at the end of a generation:
                1 + the
                accepted tokens of positions below k, for each verify step (a verify step is what proposes position 0).
                Only for a k that was really proposed. Where the line flattens, drafting further is waste."""
                if k == 1
                else "",
            )
        )
    return rules


def replica_rules() -> list[Rule]:
    """Each replica by itself: to find the one that is different."""
    ratio = names.ACCEPTANCE_LENGTH
    above, below = names.RATIOS[ratio]
    return [
        Rule("specdec:replica_generations:rate5m", summed(REPLICA, _rate(counter(Metric.GENERATIONS)))),
        Rule(
            "specdec:replica_acceptance_length:ratio_rate5m",
            quotient(
                summed(REPLICA, _rate(entering(above, ratio))) + "\n",
                summed(REPLICA, _rate(entering(below, ratio))),
            ),
        ),
        Rule(
            "specdec:replicas:count",
            f"count by ({', '.join(POOL)}) (count by ({', '.join(REPLICA)}) ({counter(Metric.GENERATIONS)}))",
            why="Those that reported within Prometheus's look-back of five minutes.",
        ),
    ]


def version_rules() -> list[Rule]:
    """By `service.version`, before and after a release: sums, so that they pool like all others."""
    rules = []
    for ratio in RATIOS_BY_VERSION:
        above, below = names.RATIOS[ratio]
        name = f"specdec:version_{ratio}"
        rules += [
            Rule(f"{name}:numerator_rate5m", summed(BY_VERSION, _rate(entering(above, ratio)))),
            Rule(f"{name}:denominator_rate5m", summed(BY_VERSION, _rate(entering(below, ratio)))),
            Rule(f"{name}:ratio_rate5m", quotient(f"{name}:numerator_rate5m", f"{name}:denominator_rate5m")),
        ]
    return rules


def health_rules() -> list[Rule]:
    """What went wrong on the way."""
    return [
        Rule(
            "specdec:dropped_reports:rate5m",
            summed(("job", SOURCE, REASON), _rate(counter(Metric.DROPPED_REPORTS))),
        ),
        Rule(
            "specdec:instrumentation_errors:rate5m",
            summed(("job", SOURCE, ERROR_TYPE), _rate(counter(Metric.ERRORS))),
        ),
    ]


RECONCILED = (PROVIDER, MODEL)
"""Job and instance differ: ours came by OTLP, the engine's own by a scrape."""

ENGINES_OWN = {
    "accepted_tokens": (Metric.ACCEPTED, {"vllm": "vllm:spec_decode_num_accepted_tokens_total"}),
    "proposed_tokens": (Metric.PROPOSED, {"vllm": "vllm:spec_decode_num_draft_tokens_total"}),
    "completion_tokens": (
        Metric.COMPLETION,
        {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total"},
    ),
}


def _as_ours(inner: str, provider: str) -> str:
    """An engine's own series under our labels."""
    named = f'label_replace({inner}, "{MODEL}", "$1", "model_name", "(.*)")'
    return f'label_replace({named}, "{PROVIDER}", "{provider}", "", "")'


def _engines_own(series: str, provider: str) -> str:
    return summed(RECONCILED, _as_ours(_rate(series), provider))


def reconciliation_rules() -> list[Rule]:
    """Our counters beside those of the engines themselves."""
    rules = []
    for name, (metric, theirs) in ENGINES_OWN.items():
        providers = "|".join(theirs)
        ours = f'{counter(metric)}{{{PROVIDER}=~"{providers}", {SOURCE}="{names.ENGINE}"}}'
        rules += [
            Rule("specdec:own_tokens:rate5m", summed(RECONCILED, _rate(ours)), labels={"counter": name}),
            Rule(
                "specdec:engine_tokens:rate5m",
                "\nor\n".join(_engines_own(series, provider) for provider, series in theirs.items()),
                labels={"counter": name},
            ),
        ]
    rules += [
        Rule(
            "specdec:reconciliation:difference_rate5m",
            "specdec:own_tokens:rate5m - specdec:engine_tokens:rate5m",
            why="""vLLM counts padded drafts as proposed (after a prefix-cache hit that leaves one token) and looks
            at drafts
            only: a small difference is right, and it is theirs.""",
        ),
        Rule(
            "specdec:engine_acceptance_length:ratio_rate5m",
            "(\n1 + "
            + quotient(
                _engines_own("vllm:spec_decode_num_accepted_tokens_total", "vllm") + "\n",
                _engines_own("vllm:spec_decode_num_drafts_total", "vllm"),
            )
            + f"\n)\nor avg by ({', '.join(RECONCILED)}) (\n  "
            + _as_ours(f"avg_over_time(sglang:spec_accept_length[{WINDOW}])", "sglang")
            + "\n)",
            why="""vLLM: what it logs as mean acceptance length, before trimming, so above ours where generations are
            short.
            SGLang: a gauge of its last log interval, which can only be averaged; an indication, no more.""",
        ),
    ]
    return rules


def exact_rules(window: str = EXACT_WINDOW) -> list[Rule]:
    """Increases over windows that tile: they add up to the whole, to the token."""

    def increase(series: str) -> str:
        return f"increase({series}[{window}] anchored)"

    rules = []
    for ratio, (above, below) in names.RATIOS.items():
        rules += [
            Rule(f"specdec:{ratio}:numerator_increase1m", summed(POOL, increase(entering(above, ratio)))),
            Rule(f"specdec:{ratio}:denominator_increase1m", summed(POOL, increase(entering(below, ratio)))),
        ]
    rules.append(Rule("specdec:generations:increase1m", summed(POOL, increase(counter(Metric.GENERATIONS)))))
    for ratio in RATIOS:
        covered = summed(POOL, increase(entering(Metric.GENERATIONS, ratio)))
        rules.append(Rule(f"specdec:{ratio}:covered_increase1m", f"{covered}\nor 0 * specdec:generations:increase1m"))
    for half, metric in (("numerator", Metric.POSITION_ACCEPTED), ("denominator", Metric.POSITION_PROPOSED)):
        rules.append(
            Rule(
                f"specdec:position_accept_rate:{half}_increase1m",
                summed((*POOL, POSITION), increase(counter(metric))),
            )
        )
    for ratio in (*RATIOS, "position_accept_rate"):
        rules.append(
            Rule(
                f"specdec:{ratio}:ratio_increase1m",
                quotient(f"specdec:{ratio}:numerator_increase1m", f"specdec:{ratio}:denominator_increase1m"),
            )
        )
    rules += [
        Rule(
            "specdec:coverage:ratio_increase1m",
            quotient(f"specdec:{ratio}:covered_increase1m", "specdec:generations:increase1m"),
            labels={"ratio": ratio},
        )
        for ratio in RATIOS
    ]
    return rules


_BESIDES = [
    Group("specdec_position", position_rules()),
    Group("specdec_replica", replica_rules()),
    Group("specdec_version", version_rules()),
    Group("specdec_health", health_rules()),
    Group(
        "specdec_reconciliation",
        reconciliation_rules(),
        why="Ours beside the engines' own metrics, where those are scraped; without them these rules yield nothing.",
    ),
]


def stock_file() -> str:
    """For a Prometheus as it comes."""
    return rule_file(
        f"""
        Pooled speculative decoding ratios from the raw specdec_* counters, for any Prometheus 3 that receives OTLP.

        Every ratio: rate per series, then sum, then quotient. Only complete pairs enter: the generations whose
        {label(names.RATIO_SET)} names the ratio. A window without denominator gives no ratio. The sums are recorded
        too, so that a wider pool or a longer window divides sums, never ratios:

              sum(sum_over_time(specdec:accept_rate:numerator_rate5m[1d]))
            / sum(sum_over_time(specdec:accept_rate:denominator_rate5m[1d]))

        Five minutes, because the usual export interval of 60 s starves rate[1m]. rate extrapolates to the edges of its
        window and knows nothing before a series' first sample: expect a few percent of error in sums and 1 to 2 % in
        ratios; specdec_exact.rules.yml has none.

        Load this file or specdec_collector.rules.yml, never both: they record the same names.
        """,
        [Group("specdec_pool", [*pool_rules(), *ratio_rules()]), *_BESIDES],
    )


def collector_file() -> str:
    """For a Prometheus behind the collector of pipeline.yaml."""
    return rule_file(
        f"""
        The recorded names of specdec.rules.yml from the gauges of the collector (collector/pipeline.yaml), for a
        Prometheus that is its backend. The pooled sums are exact: each gauge is the sum of one window of the
        collector (SPECDEC_WINDOW, 60 s), and {WINDOW} of them are added. What the gauges do not tell (positions,
        replicas, versions) comes from the raw counters, which pass through the collector.

        Load this file or specdec.rules.yml, never both: they record the same names.
        """,
        [Group("specdec_pool", [*pool_rules_from_gauges(), *ratio_rules()]), *_BESIDES],
    )


def exact_file(window: str = EXACT_WINDOW, query_offset: str = EXACT_OFFSET) -> str:
    """For a Prometheus with two experimental features. Tests make it with a shorter window, the names stay."""
    return rule_file(
        """
        Exact windows (experimental in Prometheus 3.13): consecutive windows add up to the whole, to the token. The
        server needs

            --enable-feature=created-timestamp-zero-ingestion,promql-extended-range-selectors

        The first gives a series its 0 at its start time, so that a first export which carries a value and a restart
        that goes straight above its old value lose nothing; `anchored`, of the second, takes a window's edges from the
        samples at or before them instead of extrapolating. May be loaded beside either of the other files.
        """,
        [
            Group(
                "specdec_exact",
                exact_rules(window),
                why="""interval: equal to the window, so that windows tile. query_offset: longer than an export takes to
                arrive, its retries included; a sample that arrives after its window was evaluated is in no window
                (without the offset 18 % were lost).""",
                interval=window,
                query_offset=query_offset,
            )
        ],
    )
