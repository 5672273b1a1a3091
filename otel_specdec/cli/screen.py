"""One screen of `watch`: as much of every group as the terminal has room for. Pure; needs rich.

Three sizes, by what fits: everything (ratios of all windows, positions as bars, the latest generations), ratios alone,
and one line for each group.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from otel_specdec import names
from otel_specdec.cli.windows import SINCE_START, WINDOWS, Generation
from otel_specdec.cli.windows import Group as Pool
from otel_specdec.pooling import Pooled

TITLES: Final = {
    names.ACCEPTANCE_LENGTH: "acceptance length",
    names.ACCEPT_RATE: "accept rate",
    names.TOKENS_PER_VERIFY: "tokens/verify",
}
_CAVEAT: Final = "tokens/verify has tokens of steps without drafts in it: compare it with itself"
_BAR: Final = 24
_RATIO_LINES: Final = 2 + len(WINDOWS) + 1  # title, head, windows, since start
_SHOWN_GENERATIONS: Final = 3
_PERIOD: Final = "5 min"
"""The window of what is shown for one window alone; since the start where nothing is in it."""


@dataclass(frozen=True)
class Screen:
    """A rich renderable.

    Attributes:
        pools: what is shown. status: the first line. remarks: lines of their own, below it. bounded: whether to fit the
        terminal's height.
    """

    pools: Sequence[Pool]
    status: str
    remarks: Sequence[str] = ()
    bounded: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay out for this console as it is now."""
        width = options.max_width
        remarks = [line for remark in self.remarks for line in textwrap.wrap(remark, width, break_on_hyphens=False)]
        yield _line(self.status, "dim", width)
        yield from (_line(remark, "yellow", width) for remark in remarks)
        room = (options.height or console.height) - 1 - len(remarks) if self.bounded else 100_000
        for place, block in enumerate(_blocks(self.pools, room, width)):
            yield _line("" if place else _CAVEAT, "dim", width)
            yield block


def _blocks(pools: Sequence[Pool], room: int, width: int) -> Iterable[RenderableType]:
    """What is shown, in so many lines with the one before each block: empty, before the first one the caveat."""
    if not pools:
        return
    if sum(1 + _full_lines(pool) for pool in pools) <= room:
        yield from (_full(pool, width) for pool in pools)
        return
    ratios_alone = (1 + _RATIO_LINES) * len(pools)
    if ratios_alone <= room:
        for pool in pools:
            more = _full_lines(pool) - _RATIO_LINES
            fits = ratios_alone + more <= room
            ratios_alone += more if fits else 0
            yield _full(pool, width) if fits else _ratios(pool, width)
        return
    lines = room - 3  # the one before the block, and the head's two
    shown = sorted(
        sorted(pools, key=_tokens, reverse=True)[: lines if len(pools) <= lines else max(0, lines - 1)], key=pools.index
    )
    if len(shown) < len(pools):
        rest = f"… and {len(pools) - len(shown)} with less to do: enlarge the terminal, or choose with --model"
        yield Group(*([_overview(shown, width)] if shown else []), _line(rest, "dim", width))
        return
    yield _overview(shown, width)
    room = lines - len(pools)
    for pool in sorted(pools, key=_tokens, reverse=True):
        if 1 + _full_lines(pool) <= room:
            room -= 1 + _full_lines(pool)
            yield _full(pool, width)


def _tokens(pool: Pool) -> int:
    return _period(pool)[1].totals.get("completion", 0)


def _period(pool: Pool) -> tuple[str, Pooled]:
    """The window of which positions and overview speak, and its sums."""
    recent = pool.windows[_PERIOD]
    return (_PERIOD, recent) if any(recent.totals.values()) else (SINCE_START, pool.windows[SINCE_START])


def _full_lines(pool: Pool) -> int:
    positions = len(_period(pool)[1].accept_rate_by_position)
    generations = min(len(pool.latest), _SHOWN_GENERATIONS)
    return _RATIO_LINES + (1 + positions if positions else 0) + (1 + generations if generations else 0)


def _name(pool: Pool) -> tuple[str, str, str]:
    found = pool.attributes
    who = " ".join(str(found[name]) for name in (names.PROVIDER, names.SOURCE) if name in found)
    return str(found.get(names.MODEL, "unknown model")), str(found.get(names.METHOD, "unknown method")), who


def _full(pool: Pool, width: int) -> RenderableType:
    parts = [_ratios(pool, width)]
    title, period = _period(pool)
    if period.accept_rate_by_position:
        parts.append(_positions(title, period))
    if pool.latest:
        parts.append(_line("latest generations, by what they did since the export before", "bold", width))
        parts += [_generation(each, width) for each in pool.latest[:_SHOWN_GENERATIONS]]
    return Group(*parts)


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=False)


def _ratios(pool: Pool, width: int) -> RenderableType:
    model, method, who = _name(pool)
    table = _table()
    table.add_column("", no_wrap=True)
    for title in (*TITLES.values(), "coverage", "generations"):
        table.add_column(title, justify="right", no_wrap=True)
    for title, pooled in pool.windows.items():
        cells = [
            Text(ratio(name, pooled), "bold green" if name == names.ACCEPTANCE_LENGTH else "bold") for name in TITLES
        ]
        table.add_row(title, *cells, _coverage(pooled), f"{pooled.generations:,}")
    return Group(_line(f"{model} · {method} · {who}", "bold cyan", width), table)


def _positions(title: str, pooled: Pooled) -> RenderableType:
    table = _table()
    table.add_column("position", justify="right", no_wrap=True)
    table.add_column(f"accept rate, {title}", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("  with k =", justify="right", no_wrap=True)
    table.add_column("acceptance length", justify="right", no_wrap=True)
    for position, rate in pooled.accept_rate_by_position.items():
        cells = round(rate * _BAR)
        bar = Text("█" * cells, "green").append("·" * (_BAR - cells), "dim")
        length = pooled.acceptance_length_by_k.get(position + 1)
        table.add_row(str(position), bar, f"{rate:.1%}", str(position + 1), "–" if length is None else f"{length:.3f}")
    return table


def _generation(generation: Generation, width: int) -> Text:
    counts = generation.counts
    said = [time.strftime("%H:%M:%S", time.localtime(generation.time_ms / 1000)), generation.response_id]
    if generation.choice:
        said.append(f"[{generation.choice}]")
    if counts.get("verify") and "emitted" in counts:
        said.append(f"length {counts['emitted'] / counts['verify']:.2f}")
    if "accepted" in counts:
        said.append(f"accepted {counts['accepted']}" + (f"/{counts['proposed']}" if "proposed" in counts else ""))
    if "completion" in counts:
        said.append(f"{counts['completion']:,} tokens")
    return _line("  ".join(said), "default", width)


def _overview(pools: Sequence[Pool], width: int) -> RenderableType:
    """A line for each, of one window (those marked * had nothing in it). What all have in common is in the head."""
    periods = [_period(pool) for pool in pools]
    titles = {title for title, _ in periods}
    common = [_PERIOD if _PERIOD in titles else SINCE_START]
    columns: list[tuple[str, list[str], str]] = []  # head, cells, style
    for head, cells in (
        ("\nmethod", [_name(pool)[1][:16] for pool in pools]),
        ("\ncounted by", [_name(pool)[2] for pool in pools]),
    ):
        if len(set(cells)) > 1:
            columns.append((head, cells, ""))
        else:
            common.append(cells[0])
    for name, head in (
        (names.ACCEPTANCE_LENGTH, "acceptance\nlength"),
        (names.ACCEPT_RATE, "accept\nrate"),
        (names.TOKENS_PER_VERIFY, "tokens/\nverify"),
    ):
        style = "bold green" if name == names.ACCEPTANCE_LENGTH else "bold"
        columns.append((head, [ratio(name, pooled) for _, pooled in periods], style))
    columns.append(("cover-\nage", [_coverage(pooled) for _, pooled in periods], ""))
    columns.append(("gener-\nations", [f"{pooled.generations:,}" for _, pooled in periods], ""))
    room = max(8, width - sum(max(map(len, [*head.split("\n"), *cells])) + 1 for head, cells, _ in columns))
    table = _table()
    table.add_column(f"{' · '.join(common)[:room]}\nmodel", no_wrap=True)
    for head, _, style in columns:
        table.add_column(head, style=style, justify="right" if style or "-" in head else "left", no_wrap=True)
    for number, (pool, (title, _)) in enumerate(zip(pools, periods, strict=True)):
        mark = "*" if len(titles) > 1 and title == SINCE_START else ""
        model = mark + _shortened(_name(pool)[0], room - len(mark))
        table.add_row(Text(model), *(Text(cells[number]) for _, cells, _ in columns))
    return table


def _shortened(model: str, room: int) -> str:
    """A model's name in so many characters; what tells models apart is in its last part, at both ends."""
    if len(model) > room:
        model = model.rstrip("/").rpartition("/")[2]
    if len(model) > room:
        end = (room - 1) // 2
        model = f"{model[: room - 1 - end]}…{model[len(model) - end :]}"
    return model


def ratio(name: str, pooled: Pooled) -> str:
    """A ratio as it is shown; a dash where there is none, which is not 0."""
    value = pooled.ratios.get(name)
    return "–" if value is None else f"{value:.1%}" if name == names.ACCEPT_RATE else f"{value:.3f}"


def _coverage(pooled: Pooled) -> str:
    """That of the three ratios, in one where it is the same."""
    parts = [f"{pooled.coverage[name]:.0%}" for name in TITLES if name in pooled.coverage]
    if not parts:
        return "–"
    return parts[0] if len(set(parts)) == 1 else "/".join(part.removesuffix("%") for part in parts)


def _line(text: str, style: str, width: int) -> Text:
    line = Text(text, style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def as_json(pools: Sequence[Pool], **more: object) -> Mapping[str, object]:
    """The same for scripts: plain numbers, unknown ones absent."""
    return {
        **more,
        "groups": [
            {
                "attributes": dict(pool.attributes),
                "windows": {title.replace(" ", "_"): _pooled_json(pooled) for title, pooled in pool.windows.items()},
                "latest": [
                    {
                        "id": each.response_id, "choice": each.choice, "trace_id": each.trace_id,
                        "time_unix_ms": each.time_ms, "counts": each.counts,
                    }
                    for each in pool.latest
                ],
            }
            for pool in pools
        ],
    }  # fmt: skip


def _pooled_json(pooled: Pooled) -> Mapping[str, object]:
    return {
        "totals": dict(pooled.totals),
        "generations": pooled.generations,
        "ratios": dict(pooled.ratios),
        "coverage": dict(pooled.coverage),
        "accept_rate_by_position": dict(pooled.accept_rate_by_position),
        "acceptance_length_by_k": dict(pooled.acceptance_length_by_k),
    }
