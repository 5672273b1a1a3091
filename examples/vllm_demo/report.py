"""What the counters say, set beside the averages that mislead: read from decoded OTLP points, printed with rich.

Every ratio here is a quotient of sums taken downstream, as a dashboard would take it: a counter's points enter the
ratios that their `specdec.ratio_set` names, and no others. Reading and arithmetic are plain functions on values; only
`render` and what it calls print. Needs rich; names come from `otel_specdec.names`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from examples.vllm_demo.otlp_receiver import Exemplar, OtlpReceiver, Point
from examples.vllm_demo.server import Samples, total
from examples.vllm_demo.traffic import Answer, sequences
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import (
    ACCEPT_RATE,
    ACCEPTANCE_LENGTH,
    CHOICE,
    ENGINE,
    NONE,
    POSITION,
    RATIO_SET,
    RATIOS,
    RESPONSE_ID,
    SOURCE,
    TOKENS_PER_VERIFY,
    Metric,
)

_TITLES = {
    ACCEPTANCE_LENGTH: "acceptance length",
    ACCEPT_RATE: "accept rate",
    TOKENS_PER_VERIFY: "tokens per verify",
}
_BAR = 24  # cells of a full bar
# Counted in the frontend, where the package does that: a version that does not leaves those tokens unexplained.
_TRIMMED = next((metric for metric in Metric if metric.value == "specdec.trimmed_tokens"), None)


@dataclass(frozen=True)
class Ratio:
    """A quotient of sums; `value` is None over a denominator of 0 (no ratio, which is not 0)."""

    name: str
    numerator: int | float
    denominator: int | float
    covered: int | float
    generations: int | float

    @property
    def value(self) -> float | None:
        return self.numerator / self.denominator if self.denominator else None

    @property
    def coverage(self) -> float | None:
        """The part of all generations that this ratio speaks for."""
        return self.covered / self.generations if self.generations else None


@dataclass(frozen=True)
class Counters:
    """The last point of every stream of the engine's counters, at one moment."""

    streams: Mapping[Metric, tuple[Point, ...]]

    @classmethod
    def read(cls, receiver: OtlpReceiver) -> Counters:
        """Everything that the engine itself counted: a recorder may count the same generations again."""
        return cls(
            {
                metric: tuple(
                    point for point in receiver.streams(metric.value) if point.attributes.get(SOURCE, ENGINE) == ENGINE
                )
                for metric in Metric
            }
        )

    def __bool__(self) -> bool:
        return any(self.streams.values())

    def total(self, metric: Metric) -> int | float | None:
        """The sum over all ratio sets: every known value. None where no point came."""
        points = self.streams.get(metric, ())
        return sum(point.value for point in points) if points else None

    @property
    def trimmed(self) -> int | float | None:
        """Committed tokens that the frontend kept from the client; None where nobody counts them."""
        return self.total(_TRIMMED) if _TRIMMED is not None else None

    def ratio(self, name: str) -> Ratio:
        """One pooled ratio over everything that was read."""
        numerator, denominator = RATIOS[name]
        return Ratio(
            name,
            numerator=self._entering(numerator, name),
            denominator=self._entering(denominator, name),
            covered=self._entering(Metric.GENERATIONS, name),
            generations=self.total(Metric.GENERATIONS) or 0,
        )

    def positions(self) -> list[tuple[int, int | float, int | float]]:
        """Draft position, accepted, proposed; only positions where something was proposed."""
        accepted, proposed = self._by_position(Metric.POSITION_ACCEPTED), self._by_position(Metric.POSITION_PROPOSED)
        return [(position, accepted.get(position, 0), proposed[position]) for position in sorted(proposed)]

    def ratio_sets(self, metric: Metric) -> list[str]:
        """The ratio sets of a metric's points, those first that are not `none`."""
        sets = {str(point.attributes[RATIO_SET]) for point in self.streams[metric] if RATIO_SET in point.attributes}
        return sorted(sets, key=lambda one: (one == NONE, one))

    def _entering(self, metric: Metric, ratio: str) -> int | float:
        return sum(
            point.value
            for point in self.streams.get(metric, ())
            if ratio in str(point.attributes.get(RATIO_SET, NONE)).split(",")
        )

    def _by_position(self, metric: Metric) -> dict[int, int | float]:
        sums: dict[int, int | float] = {}
        for point in self.streams.get(metric, ()):
            position = point.attributes.get(POSITION)
            if isinstance(position, int) and (point.value or metric is Metric.POSITION_ACCEPTED):
                sums[position] = sums.get(position, 0) + point.value
        return sums


@dataclass(frozen=True)
class Average:
    """One way to come by the same three numbers that is not a quotient of sums; None where it has no such number."""

    how: str
    values: Mapping[str, float | None]


def averages(answers: Sequence[Answer], samples: Samples) -> list[Average]:
    """What else is reported for the same traffic: means over requests, and vLLM's own figures of its `/metrics`."""
    reported = [answer for answer in answers if answer.speculation is not None]
    lengths = [float(answer.speculation["mean_acceptance_length"]) for answer in reported if answer.speculation]
    rates = [float(answer.speculation["draft_acceptance_rate"]) for answer in reported if answer.speculation]
    per_verify = [
        answer.tokens / answer.speculation["num_spec_steps"]
        for answer in reported
        if answer.speculation and answer.speculation["num_spec_steps"]
    ]
    silent = len(answers) - len(reported)

    def mean(values: Iterable[float], zeros: int = 0) -> float | None:
        padded = [*values, *([0.0] * zeros)]
        return fmean(padded) if padded else None

    accepted = total(samples, "vllm:spec_decode_num_accepted_tokens_total")
    drafts = total(samples, "vllm:spec_decode_num_drafts_total")
    draft_tokens = total(samples, "vllm:spec_decode_num_draft_tokens_total")
    return [
        Average(
            f"mean over the {len(reported)} requests that report",
            {ACCEPTANCE_LENGTH: mean(lengths), ACCEPT_RATE: mean(rates), TOKENS_PER_VERIFY: mean(per_verify)},
        ),
        Average(
            f"the same, {silent} silent requests as 0.0",
            {
                ACCEPTANCE_LENGTH: mean(lengths, silent),
                ACCEPT_RATE: mean(rates, silent),
                TOKENS_PER_VERIFY: mean(per_verify, len(answers) - len(per_verify)),
            },
        ),
        Average(
            "vLLM's /metrics, 1 + accepted / drafts",
            {
                ACCEPTANCE_LENGTH: 1 + accepted / drafts if accepted is not None and drafts else None,
                ACCEPT_RATE: accepted / draft_tokens if accepted is not None and draft_tokens else None,
            },
        ),
    ]


@dataclass(frozen=True)
class Finding:
    """One statement that the run can prove or refute."""

    statement: str
    holds: bool


@dataclass(frozen=True)
class Stage:
    """Requests that ended in one way, and the counters as they were when all of it had arrived."""

    answers: Sequence[Answer]
    counters: Counters

    @property
    def received(self) -> int:
        """The token ids that clients got."""
        return sum(answer.tokens for answer in self.answers)


@dataclass(frozen=True)
class Run:
    """All that one run of the demo gave, its stages in the order they were run; `samples` are vLLM's, at the end."""

    whole: Stage
    """Answered in full: by length, by the model's own end, by a stop token, by a grammar."""
    stopped: Stage
    """Ended by a stop string, which the frontend finds in the text after the engine has gone on."""
    aborted: Stage
    """Clients that hung up in mid-stream."""
    samples: Samples
    exemplars: Mapping[str, Mapping[Metric, Exemplar]] = field(default_factory=dict)
    """By response id, those of sequence 0: the exemplar on each counter."""

    @property
    def final(self) -> Counters:
        return self.aborted.counters

    @property
    def answers(self) -> list[Answer]:
        return [*self.whole.answers, *self.stopped.answers, *self.aborted.answers]

    def committed(self) -> tuple[int | float, int | float, int | float]:
        """The tokens that the engine committed in each stage."""
        whole, stopped, aborted = (
            stage.counters.total(Metric.COMPLETION) or 0 for stage in (self.whole, self.stopped, self.aborted)
        )
        return whole, stopped - whole, aborted - stopped

    def findings(self) -> list[Finding]:
        """What must be true of the counters and of what the clients got."""
        whole, stopped, aborted = self.committed()
        trimmed = self.stopped.counters.trimmed
        generations, number = self.final.total(Metric.GENERATIONS) or 0, len(sequences(self.answers))
        errors = self.final.total(Metric.ERRORS) or 0
        traces = _traces(self.answers)
        strangers = [
            response
            for response, found in self.exemplars.items()
            if any(exemplar.trace_id != traces.get(response) for exemplar in found.values())
        ]
        known = [right for answer in self.answers if (right := answer.as_expected()) is not None]
        return [
            Finding("answered in full: every token committed was received, and no other", whole == self.whole.received),
            Finding(
                "stop strings: what was committed and not trimmed was received"
                if trimmed is not None
                else "stop strings: no more was received than committed (nobody counts what was trimmed)",
                stopped - trimmed == self.stopped.received if trimmed is not None else stopped >= self.stopped.received,
            ),
            Finding("aborts: no more was received than committed", aborted >= self.aborted.received),
            Finding(
                f"{_n(len(self.exemplars))} responses named by exemplars, each with the id and the trace of its client",
                bool(self.exemplars) and not strangers,
            ),
            Finding(
                f"{_n(generations)} generations counted, {_n(number)} sequences at the clients", generations == number
            ),
            Finding(f"{known.count(True)} of {len(known)} greedy answers are those of plain decoding", all(known)),
            Finding(f"{_n(errors)} errors of the instrumentation", errors == 0),
        ]


def named_exemplars(receiver: OtlpReceiver) -> dict[str, dict[Metric, Exemplar]]:
    """The exemplars that name a response, by its id and by counter, in the order in which they came."""
    named: dict[str, dict[Metric, Exemplar]] = {}
    for metric in (*METRIC_OF_FIELD.values(), Metric.GENERATIONS):
        for point in receiver.points(metric.value):
            for exemplar in point.exemplars:
                response = exemplar.filtered_attributes.get(RESPONSE_ID)
                if isinstance(response, str) and exemplar.filtered_attributes.get(CHOICE, "0") == "0":
                    named.setdefault(response, {})[metric] = exemplar
    return named


def _traces(answers: Iterable[Answer]) -> dict[str, str]:
    """The trace id that each client sent, by the response id that it got."""
    return {answer.response_id: answer.ask.headers.get("traceparent", "--").split("-")[1] for answer in answers}


def render(run: Run, console: Console) -> bool:
    """Print the report; whether everything in it that can be checked holds."""
    console.print()
    console.print(_counters_table(run.final))
    console.print(_ratios_table(run.final))
    _note(
        console,
        "Acceptance length is the one to look at first: it compares across engines. Tokens per verify compares with "
        "nothing else: steps without drafts add completion and no verify, so with n-gram drafts it has no upper bound.",
    )
    console.print(_averages_table(run))
    _note(
        console,
        "A mean over requests weighs 2 tokens like 300, and misses the requests that report nothing: stop strings, "
        "aborts, n > 1. vLLM's own length counts drafts accepted behind a stop or a limit, which nobody was given, and "
        "padding.",
    )
    console.print(_positions_table(run))
    _note(
        console,
        "vLLM's documented rate divides by all drafts, also by those too short to have anything at the position.",
    )
    console.print(_exemplars_table(run))
    _note(
        console,
        "From a point on a graph to the generation behind it: at most 4 for each collection, the one with the "
        "lowest accept rate and an unbiased sample of the others. Id and trace are the client's own; each value is "
        "that generation's share in the counter.",
    )
    console.print(_reconciliation_table(run))
    trimmed = run.stopped.counters.trimmed
    _note(
        console,
        "Committed is specdec.completion_tokens. The frontend finds a stop string when the engine has gone on already: "
        f"what is behind it is trimmed ({'not counted here' if trimmed is None else f'{_n(trimmed)} counted'}). "
        "After a client hung up the engine goes on until it hears of it.",
    )
    findings = run.findings()
    for finding in findings:
        mark = Text("✓" if finding.holds else "✗", style="green" if finding.holds else "bold red")
        console.print(mark.append(f" {finding.statement}", style="default"))
    console.print()
    return all(finding.holds for finding in findings)


def render_nothing(received: Iterable[str], answers: Sequence[Answer], samples: Samples, console: Console) -> None:
    """Say that no counter of ours arrived, and what did; `received` are the names of all metrics that came."""
    names = sorted(set(received))
    got, drafts = sum(answer.tokens for answer in answers), total(samples, "vllm:spec_decode_num_drafts_total")
    console.print()
    console.print("No specdec.* point arrived.", style="bold red")
    console.print(
        f"Clients got {_n(got)} token ids in {len(sequences(answers))} sequences, and vLLM itself speaks of "
        f"{'no' if drafts is None else _n(drafts)} drafts."
    )
    console.print(f"Other metrics that came: {escape(', '.join(names)) if names else 'none'}.")
    console.print(
        "Is otel_specdec installed in the environment of the server, and none of its instrumentors disabled by\n"
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS? `python -m pip install -e .` puts it there.",
        style="dim",
    )


def _note(console: Console, text: str) -> None:
    """A remark below a table, in lines of a length that reads well."""
    console.print(Padding(Text(text, style="dim"), (0, 0, 1, 2)), width=min(console.width, 112))


def _table(title: str, *columns: str, text: Collection[int] = (0,), wrap: int | None = None) -> Table:
    """A table in the report's one style: numbers to the right, text to the left; column `wrap` gives way."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in text else "right", no_wrap=number != wrap, overflow="fold")
    return table


def _counters_table(counters: Counters) -> Table:
    title = "Raw counters: specdec.*, the last value of every stream, summed"
    table = _table(title, "counter", "sum", "unit", "series", "ratio_set", text=(0, 2, 4), wrap=4)
    for metric in Metric:
        value = counters.total(metric)
        if value is None:
            continue
        name = metric.value.removeprefix("specdec.")
        sets = " | ".join(counters.ratio_sets(metric)).replace(",", ", ")  # where a line may break
        table.add_row(name, _n(value), metric.unit.strip("{}"), str(len(counters.streams[metric])), sets or "–")
    return table


def _ratios_table(counters: Counters) -> Table:
    title = "Pooled ratios: sums first, then one quotient"
    table = _table(title, "ratio", "value", "numerator / denominator", "coverage", wrap=3)
    for name, (numerator, denominator) in RATIOS.items():
        ratio = counters.ratio(name)
        table.add_row(
            _TITLES[name],
            Text(_ratio(name, ratio.value), style="bold green" if name == ACCEPTANCE_LENGTH else "bold"),
            f"{_n(ratio.numerator)} {_short(numerator)} / {_n(ratio.denominator)} {_short(denominator)}",
            _covered(ratio),
        )
    return table


def _averages_table(run: Run) -> Table:
    table = _table("Beside them: averages of ratios", "", *(_TITLES[name] for name in RATIOS), wrap=0)
    pooled = {name: run.final.ratio(name).value for name in RATIOS}
    table.add_row(
        Text("pooled: Σ / Σ, from OTLP", style="bold"),
        # as wide as the others, whose deviation follows the number
        *(Text(_ratio(name, pooled[name]), style="bold green").append(" " * 9) for name in RATIOS),
    )
    for average in averages(run.answers, run.samples):
        cells = []
        for name in RATIOS:
            value, right = average.values.get(name), pooled[name]
            if value is None or not right:
                cells.append(Text("–" + " " * 9, style="dim"))
                continue
            off = value / right - 1
            style = "red" if abs(off) >= 0.005 else "default"
            cells.append(Text(_ratio(name, value)).append(f"  {off:+7.1%}", style=style))
        table.add_row(average.how, *cells)
    return table


def _positions_table(run: Run) -> Table:
    title = "Accept rate by draft position"
    table = _table(title, "position", "accepted / proposed", "rate", "", "vLLM's", text=(0, 3))
    drafts = total(run.samples, "vllm:spec_decode_num_drafts_total")
    for position, accepted, proposed in run.final.positions():
        rate = accepted / proposed
        cells = round(rate * _BAR)
        own = total(run.samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position))
        table.add_row(
            str(position),
            f"{_n(accepted)} / {_n(proposed)}",
            f"{rate:.1%}",
            Text("█" * cells, style="green").append("·" * (_BAR - cells), style="dim"),
            f"{own / drafts:.1%}" if own is not None and drafts else "–",
        )
    return table


def _exemplars_table(run: Run) -> Table:
    table = _table("Exemplars", "response", "trace", "length", "accepted", "proposed", "verify", text=(0, 1))
    asked = {answer.response_id: answer.ask.name for answer in run.answers}
    known = [response for response in run.exemplars if response in asked]
    for response in known[:: max(1, len(known) // 6)][:6]:
        found = run.exemplars[response]
        values = (found[metric].value if metric in found else 0 for metric in (Metric.ACCEPTED, Metric.PROPOSED))
        verify = found[Metric.VERIFY].value if Metric.VERIFY in found else 0
        emitted = found[Metric.EMITTED].value if Metric.EMITTED in found else 0
        table.add_row(
            Text(response).append(f"  {asked[response]}", "dim"),
            found[Metric.GENERATIONS].trace_id[:16] + "…" if Metric.GENERATIONS in found else "",
            _ratio(ACCEPTANCE_LENGTH, emitted / verify if verify else None),
            *map(_n, values),
            _n(verify),
        )
    return table


def _reconciliation_table(run: Run) -> Table:
    table = _table("Where every token went", "", "sequences", "committed", "received", "difference")
    stages = (("answered in full", run.whole), ("stop string", run.stopped), ("client hung up", run.aborted))
    for (title, stage), committed in zip(stages, run.committed(), strict=True):
        number, received = len(sequences(stage.answers)), stage.received
        table.add_row(title, _n(number), _n(committed), _n(received), _n(committed - received))
    return table


def _short(metric: Metric) -> str:
    """A counter's name without its namespace and unit."""
    return str(metric.value).removeprefix("specdec.").removesuffix("_tokens").removesuffix("_steps")


def _ratio(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.1%}" if name == ACCEPT_RATE else f"{value:.3f}"


def _covered(ratio: Ratio) -> str:
    if ratio.coverage is None:
        return "no generations"
    return f"{ratio.coverage:.0%} ({_n(ratio.covered)}/{_n(ratio.generations)})"


def _n(value: int | float) -> str:
    """A count; counters are whole numbers whatever type they came in."""
    return f"{value:,.0f}"
