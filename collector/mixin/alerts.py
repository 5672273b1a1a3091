"""Alerts on recorded names: each says what is wrong, what it costs, and where to look first."""

from __future__ import annotations

from collector.mixin.prometheus_names import MODEL, POOL, REASON
from collector.mixin.yaml_files import Group, Rule, rule_file
from otel_specdec import names

_ON_POOL = f"on ({', '.join(POOL)})"


def _alert(name: str, expr: str, hold: str, severity: str, summary: str, description: str, why: str = "") -> Rule:
    return Rule(
        name,
        expr,
        alert=True,
        hold=hold,
        labels={"severity": severity},
        annotations={"summary": summary, "description": " ".join(description.split())},
        why=why,
    )


def alerts() -> list[Rule]:
    """Every alert. Thresholds are those of a first day: copy and change them."""
    length = f"specdec:{names.ACCEPTANCE_LENGTH}"
    pool = f"{{{{ $labels.{MODEL} }}}} ({{{{ $labels.job }}}})"
    return [
        _alert(
            "SpecDecAcceptanceLengthCollapsed",
            f"""
  {length}:ratio_rate5m - 1
< 0.6 * (
    sum_over_time({length}:numerator_rate5m[1d] offset 30m)
    / (sum_over_time({length}:denominator_rate5m[1d] offset 30m) > 0)
    - 1
  )
and {length}:denominator_rate5m > 0.5""",
            "15m",
            "warning",
            f"Speculation of {pool} gains much less than on its last day",
            """The acceptance length is {{ $value | printf "%.2f" }} above 1, less than 60 % of what this pool had
            over the
            last day (a quotient of the day's sums). Drafts are refused: look for a new draft model or target version
            (the dashboard's version panel), other traffic, or a changed sampling temperature. Until it is back,
            speculation costs passes of the target model that it does not save.""",
            why="""Above 1, because 1 is what a model without speculation has. Only with traffic: half a verify step
            a second.
            The day ends half an hour ago, or a slow collapse would lower what it is measured against.""",
        ),
        _alert(
            "SpecDecAcceptRateNearOne",
            f"specdec:{names.ACCEPT_RATE}:ratio_rate5m > 0.98\nand specdec:{names.ACCEPT_RATE}:denominator_rate5m > 5",
            "30m",
            "warning",
            f"Nearly every draft token of {pool} is accepted",
            """{{ $value | humanizePercentage }} of the draft tokens were accepted for half an hour. Real traffic
            does not do
            that: look for requests that repeat their prompt (n-gram), a load test, a draft model that is the target
            itself, or a verification that accepts without looking. If it is real, a larger k would pay.""",
        ),
        _alert(
            "SpecDecCoverageFell",
            f"""
  specdec:coverage:ratio_rate5m{{ratio="{names.ACCEPTANCE_LENGTH}"}}
< 0.9 * max_over_time(specdec:coverage:ratio_rate5m{{ratio="{names.ACCEPTANCE_LENGTH}"}}[1d] offset 30m)
and on ({", ".join(POOL)}) specdec:generations:rate5m > 0.05""",
            "30m",
            "warning",
            f"The acceptance length of {pool} speaks for fewer generations than before",
            """Only {{ $value | humanizePercentage }} of the finished generations have a complete pair of emitted
            tokens and
            verify steps. The ratio is still right for those, but no longer for the pool: look for an engine that was
            upgraded, responses without counters, or a decode mode in which the engine does not tell.""",
        ),
        _alert(
            "SpecDecReplicaSilent",
            f"""
(specdec:replica_generations:rate5m offset 1h > 0) * 0
unless specdec:replica_generations:rate5m
and {_ON_POOL} (specdec:replicas:count < {_ON_POOL} specdec:replicas:count offset 1h)""",
            "10m",
            "info",
            f"Replica {{{{ $labels.instance }}}} of {pool} no longer reports",
            """It finished generations an hour ago and has exported nothing for ten minutes, and its pool is smaller
            than it
            was: nobody took its place. Expected after scaling down. Else look for its export errors: the pool's ratios
            no longer speak for it.""",
            why="""A replica that was replaced, as in a rollout, has a successor: the pool's size is what it was.
            Silence is
            told by absence: OTLP is pushed, there is no `up`.""",
        ),
        _alert(
            "SpecDecReplicaStuck",
            f"""
specdec:replica_generations:rate5m == 0
and {_ON_POOL} (specdec:generations:rate5m / specdec:replicas:count > 0.02)
and on ({", ".join(POOL)}) specdec:replicas:count > 1""",
            "15m",
            "warning",
            f"Replica {{{{ $labels.instance }}}} of {pool} finishes nothing",
            """It still exports, but for 15 minutes no generation has finished on it, while the replicas of its pool
            finish
            theirs. Look for a hung engine, or a balancer that no longer sends it anything.""",
        ),
        _alert(
            "SpecDecReportsDropped",
            f'specdec:dropped_reports:rate5m{{{REASON}=~"{names.CONFLICT}|{names.INVALID}"}} > 0',
            "10m",
            "warning",
            f"A recorder of {{{{ $labels.job }}}} drops reports as {{{{ $labels.{REASON} }}}}",
            """{{ $value | printf "%.2f" }} a second. conflict: two different generations under one id, so give each
            session
            its session_id; invalid: something that is no report was recorded. They are not in the sums.""",
            why="Duplicates are not here: a retry that is counted once is what the recorder is for.",
        ),
        _alert(
            "SpecDecInstrumentationErrors",
            "specdec:instrumentation_errors:rate5m > 0",
            "10m",
            "warning",
            "The instrumentation of {{ $labels.job }} fails inside ({{ $labels.error_type }})",
            """Serving is not affected, but counts may be missing. The process has logged the first one with its
            traceback:
            look for 'otel_specdec failed while'. Usually an engine version that it does not know.""",
        ),
        _alert(
            "SpecDecDiffersFromEngine",
            """
  abs(specdec:reconciliation:difference_rate5m)
> 0.02 * specdec:engine_tokens:rate5m
and specdec:engine_tokens:rate5m > 10""",
            "30m",
            "info",
            f"Our counters and the engine's own differ for {{{{ $labels.{MODEL} }}}}",
            """{{ $labels.counter }} differ by {{ $value | printf "%.1f" }} tokens a second, more than 2 %, for half
            an hour.
            Some replicas may be scraped and not instrumented, or the other way round. Where both see the same replicas,
            see the reconciliation panel for what is the engine's own way of counting.""",
        ),
    ]


def alert_file() -> str:
    """The whole file."""
    return rule_file(
        """
        Alerts on the recorded names of specdec.rules.yml or specdec_collector.rules.yml. Thresholds are those of a
        first
        day; every alert says what it costs and where to look first.
        """,
        [Group("specdec_alerts", alerts())],
    )
