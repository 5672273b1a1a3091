"""A real vLLM server with speculative decoding on this machine's CPU, and what its counters say about its traffic.

Makes a tiny model, starts an OTLP receiver and, under `opentelemetry-instrument`, an OpenAI-compatible vLLM server with
n-gram speculation; sends mixed traffic; prints the raw counters, the ratios pooled from them, the averages that are
commonly reported instead, and where every token went. Two to three minutes, nothing downloaded, loopback only. Exits
with 0 if the counters arrived and agree with what the clients got, else with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.report import Counters, Run, Stage, named_exemplars, render, render_nothing
from examples.vllm_demo.server import ServerError, VllmServer, otlp_environment
from examples.vllm_demo.tiny_model import ModelError, ensure_models
from examples.vllm_demo.traffic import Answer, Ask, aborted, greedy_mix, new_traceparent, sampled, send_now
from otel_specdec.names import METER, PROCESS

_MODEL_DIR = Path(__file__).resolve().parents[2] / "build" / "models"
_SETTLE_SECONDS = 30.0


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


class Steps:
    """Tells how far the demo is: one moving line on a terminal, plain lines now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._start = self._told = 0.0
        self._show: Callable[[Text], None] = self._print_sometimes

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """One step; its line stays, with how long it took and whether it worked."""
        self._title, self._start, self._told = title, time.monotonic(), time.monotonic()
        try:
            if self._console.is_terminal:
                with self._console.status(title) as status:
                    self._show = status.update
                    yield
            else:
                self._show = self._print_sometimes
                self._console.print(f"… {title}", markup=False)
                yield
        except BaseException:
            self._end("✗", "red")
            raise
        self._end("✓", "green")

    def say(self, text: str) -> None:
        """What the step is at."""
        seconds = time.monotonic() - self._start
        line = Text(f"{self._title} · {seconds:.0f} s · ").append(text, style="dim")
        line.truncate(max(20, self._console.width - 4), overflow="ellipsis")
        self._show(line)

    def _print_sometimes(self, line: Text) -> None:
        if time.monotonic() - self._told >= 10:
            self._told = time.monotonic()
            self._console.print(Text("  ").append_text(line))

    def _end(self, mark: str, style: str) -> None:
        seconds = time.monotonic() - self._start
        self._console.print(
            Text(mark, style=style).append(f" {self._title}", "default").append(f" · {seconds:.1f} s", "dim")
        )


def demo(options: argparse.Namespace, console: Console) -> bool:
    """Run the demo; whether the counters arrived and agree with what the clients got."""
    steps = Steps(console)
    with steps.step("Models"):
        models = ensure_models(options.model_dir)
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(OtlpReceiver(grpc=False))
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-demo-")))
        server = VllmServer(
            models.target,
            served_name=options.served_name,
            instrument=True,
            env={
                **otlp_environment(receiver.http_endpoint, service="vllm-demo", interval_ms=options.interval_ms),
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            extra_args=(
                # for the averages only: the counters do not need it
                "--per-request-spec-decode-metrics",
                "summary",
                # vLLM keeps a request's trace context only if it exports traces itself (the receiver drops them)
                "--otlp-traces-endpoint",
                f"{receiver.http_endpoint}/v1/traces",
            ),
            work_dir=work_dir,
            start_seconds=options.start_seconds,
            progress=lambda _, line: steps.say(line),
        )
        stack.callback(server.stop)  # while it starts, too
        with steps.step("vLLM server"):
            server.start()
        try:
            return _observe(options, console, steps, receiver, server)
        except DemoError as error:
            raise DemoError(f"{error}\nThe end of the server's log:\n{server.log_tail(15)}") from error
        finally:
            with steps.step("Stopping"):
                server.stop()


def _observe(
    options: argparse.Namespace, console: Console, steps: Steps, receiver: OtlpReceiver, server: VllmServer
) -> bool:
    """Send the traffic in three stages, by how much of it the clients get, and read the counters after each."""
    mix = greedy_mix() * options.rounds

    def counted(answers: list[Answer]) -> Stage:
        with steps.step("Its counters"):
            _settle(receiver, options.interval_ms, steps)
        return Stage(answers, Counters.read(receiver))

    with steps.step("Traffic, answered in full"):
        answers = _send([ask for ask in mix if not ask.body.get("stop")], steps, server)
        answers += _send(sampled(), steps, server)  # alone: see there
    whole = counted(answers)
    with steps.step("Traffic, ended by stop strings"):
        answers = _send([ask for ask in mix if ask.body.get("stop")], steps, server)
    stopped = counted(answers)
    with steps.step("Clients that hang up"):
        answers = _send(aborted() * options.rounds, steps, server)
    run = Run(whole, stopped, counted(answers), server.metrics(), named_exemplars(receiver))
    if run.final:
        return render(run, console)
    render_nothing((point.metric for point in receiver.points()), run.answers, run.samples, console)
    return False


def _send(asks: Sequence[Ask], steps: Steps, server: VllmServer) -> list[Answer]:
    """Send requests; DemoError unless each was answered."""
    done = 0

    def answered(answer: Answer) -> None:
        nonlocal done
        done += 1
        steps.say(f"{done} of {len(asks)} requests, the last: {answer.ask.name}")

    traced = [replace(ask, headers={**ask.headers, "traceparent": new_traceparent()}) for ask in asks]
    answers = send_now(server.url, server.served_name, traced, answered=answered)
    failed = [f"{answer.ask.name}: {answer.error}" for answer in answers if answer.error is not None]
    if failed:
        raise DemoError("Requests that failed:\n" + "\n".join(failed[:10]))
    return answers


def _settle(receiver: OtlpReceiver, interval_ms: int, steps: Steps) -> None:
    """Wait until every process that counts has exported what it counted until now; bounded, no error if one never does.

    Collections a whole interval after now will do: what is under way, such as an abort, is in them.
    """
    since = time.time_ns() + (interval_ms + 1000) * 1_000_000

    def exported(received: OtlpReceiver) -> bool:
        steps.say(f"{len(received.requests)} exports received")
        last: dict[object, int] = {}
        for point in received.points():
            if point.scope_name == METER:
                process = point.attributes.get(PROCESS)
                last[process] = max(last.get(process, 0), point.time_unix_nano)
        return bool(last) and min(last.values()) >= since

    receiver.wait(exported, min(_SETTLE_SECONDS, 10 + 4 * interval_ms / 1000))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.vllm_demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-dir", type=Path, default=_MODEL_DIR, help="where the tiny models are kept (build/models)"
    )
    parser.add_argument("--served-name", default="tiny", help="the model's name in the API and on the counters (tiny)")
    parser.add_argument("--rounds", type=int, default=3, help="how often the mix of requests is sent (3)")
    parser.add_argument("--interval-ms", type=int, default=2000, help="milliseconds between exports (2000)")
    parser.add_argument("--start-seconds", type=float, default=300, help="how long the server may take to start (300)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not 100 <= options.interval_ms <= 5000:
        parser.error("--rounds must be at least 1, --interval-ms from 100 to 5000")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status; whatever happens, server and receiver are stopped."""
    options = _options(arguments)
    terminal = sys.stdout.isatty()
    # Not a terminal: plain text, as wide as the tables want to be.
    console = Console(highlight=False, width=None if terminal else 120, force_terminal=None if terminal else False)

    def ended(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)  # through the context managers, so that the server goes too

    previous = signal.signal(signal.SIGTERM, ended)
    try:
        return 0 if demo(options, console) else 1
    except (DemoError, ModelError, ServerError, OSError, ImportError) as error:
        console.print(f"\nThe demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted.", style="red")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
