"""`otel-specdec watch`: pooled ratios, live, for those who have no dashboard yet.

One thread draws; counters come in by an OTLP server's threads, or are asked of a Prometheus between two screens.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from rich.console import Console
from rich.live import Live

from otel_specdec import names
from otel_specdec.cli.findings import FINE, PROBLEM
from otel_specdec.cli.json_api import ApiError
from otel_specdec.cli.prometheus import Prometheus
from otel_specdec.cli.screen import Screen, as_json
from otel_specdec.cli.windows import MAX_GROUPS, MAX_SERIES, WINDOWS, Group, Windows

_WIDTH: Final = 100
"""Where the output is no terminal."""
_LOOKBACK: Final = max(WINDOWS.values()) + 60
"""Seconds of samples asked for at first: the longest window, and a sample before it (exports come every 60 s)."""
_POLL_LOOKBACK: Final = 120


def run(options: argparse.Namespace) -> int:
    """Watch until Ctrl-C, or print once; returns the exit status."""
    windows = Windows()
    told = _Told()
    previous = {number: signal.signal(number, told) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        feed = _from_prometheus(options.prometheus, windows) if options.prometheus else _by_otlp(options.port, windows)
        with feed as (source, update):
            watch = _Watch(options, windows, source, update, told)
            if options.once:
                return watch.once()
            watch.live()
    except BrokenPipeError:
        raise
    except (OSError, ApiError) as error:
        print(f"otel-specdec watch: {error}", file=sys.stderr)
        return PROBLEM
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return FINE if told.number in (0, signal.SIGINT) else 128 + told.number


class _Told:
    """Whether we are told to end, by Ctrl-C or SIGTERM.

    It is looked at between two screens: an exception in the middle of one may leave rich with a terminal that it does
    not give back. Told once more, it is an exception, for where an answer is waited for.
    """

    number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def within(self, seconds: float) -> bool:
        """Wait for so long at most; whether we are told to end."""
        end = time.monotonic() + seconds
        while not self.number and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return bool(self.number)


Feed = tuple[str, Callable[[], str]]
"""Where counters come from, in words, and what brings in what is new; that returns a remark, or nothing."""


@contextmanager
def _by_otlp(port: int, windows: Windows) -> Iterator[Feed]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from otel_specdec.cli.otlp import METRICS_PATH, listening, observations

    def receive(path: str, body: bytes) -> None:
        if path == METRICS_PATH:
            windows.observe(*observations(ExportMetricsServiceRequest.FromString(body)))

    with listening(port, receive) as (url, variables):
        wanted = f"Start the server with {variables}"
        yield f"OTLP/HTTP on {url}", lambda: "" if windows.last_arrival else wanted


@contextmanager
def _from_prometheus(url: str, windows: Windows) -> Iterator[Feed]:
    prometheus = Prometheus(url)
    windows.observe(prometheus.samples(_LOOKBACK), prometheus.exemplars(_LOOKBACK, time.time()), sampled=True)

    def update() -> str:
        try:
            found = prometheus.samples(_POLL_LOOKBACK)
            windows.observe(found, prometheus.exemplars(_POLL_LOOKBACK, time.time()), sampled=True)
        except ApiError as error:
            return str(error)
        return "" if windows.last_arrival else "It has no specdec series of the last minutes."

    yield prometheus.url, update


class _Watch:
    def __init__(
        self, options: argparse.Namespace, windows: Windows, source: str, update: Callable[[], str], told: _Told
    ) -> None:
        self._options = options
        self._windows = windows
        self._source = source
        self._update = update
        self._told = told
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)

    def once(self) -> int:
        """Wait for counters, print them, and return the exit status: 1 where none came."""
        end = time.monotonic() + self._options.wait
        collected = time.monotonic() + self._options.collect
        pause = 2.0 if self._options.prometheus else 0.2
        remark = self._update()
        while time.monotonic() < collected or (not self._pools() and time.monotonic() < end):
            if self._told.within(pause):
                break
            remark = self._update()
        self._print(remark, bounded=False)
        return FINE if self._pools() else PROBLEM

    def live(self) -> None:
        """Draw until Ctrl-C: in place on a terminal, else one screen after another."""
        pause = max(0.1, self._options.refresh)
        if self._options.json or not self._console.is_terminal:
            self._print(self._update(), bounded=False)
            while not self._told.within(pause):
                self._print(self._update(), bounded=False)
            return
        with Live(self._screen(self._update()), console=self._console, screen=True, auto_refresh=False) as live:
            while not self._told.within(pause):
                live.update(self._screen(self._update()), refresh=True)

    def _print(self, remark: str, *, bounded: bool) -> None:
        if self._options.json:
            windows = self._windows
            found = as_json(
                self._pools(), time=time.time(), source=self._source, errors=dict(windows.errors),
                dropped_reports=dict(windows.dropped), remark=remark,
            )  # fmt: skip
            print(json.dumps(found), flush=True)
        else:
            self._console.print(self._screen(remark, bounded=bounded))

    def _pools(self) -> list[Group]:
        wanted = self._options.model or ""
        return [group for group in self._windows.groups() if wanted in str(group.attributes.get(names.MODEL, ""))]

    def _screen(self, remark: str, *, bounded: bool = True) -> Screen:
        windows = self._windows
        arrived = windows.last_arrival
        ago = f"heard {time.time() - arrived:.0f} s ago" if arrived else "nothing heard yet"
        remarks = [remark] if remark else []
        if windows.errors:
            remarks.append(f"errors inside the instrumentation: {_listed(windows.errors)} (see the engine's log)")
        if windows.dropped:
            remarks.append(f"reports not counted: {_listed(windows.dropped)}")
        if windows.refused:
            remarks.append(f"more than {MAX_SERIES:,} series or {MAX_GROUPS} groups: the rest is not shown")
        status = f"{time.strftime('%H:%M:%S')} · {self._source} · {ago}"
        if bounded:
            status += " · Ctrl-C ends"
        return Screen(self._pools(), status, remarks, bounded)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
