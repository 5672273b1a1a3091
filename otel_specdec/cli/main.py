"""The command line: which command, with which options, and its exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

from otel_specdec.cli import migrate
from otel_specdec.cli.findings import FINE, INTERRUPTED, PROBLEM, USAGE
from otel_specdec.version import __version__

_STATUS: Final = f"""\
exit status:
  {FINE}    fine (doctor: no problem; warnings and notes are no problem)
  {PROBLEM}    doctor: something will not work, or the proof failed; watch: nothing arrived, or it cannot be read
  {USAGE}    the command line is wrong, or something that this command needs is not installed
  {INTERRUPTED}  ended by Ctrl-C
"""

_DOCTOR: Final = """\
Says what otel-specdec would do in this environment, and why: engines and their hooks, the ways into their processes,
SDK, exporter and endpoint, exemplars, resource, and what would keep counters from arriving. It imports no engine,
starts nothing and changes nothing; to the endpoint it sends one empty export. Run it in the environment, and with the
variables, that the server is started with; give it the server's command line after `--`, and it says what holds for
that one.

With --prove it asks a live, idle server instead: it sends known requests and compares the counters with the token ids
that came back.
"""

_WATCH: Final = """\
Pooled ratios of speculative decoding in a terminal: receives OTLP/HTTP on loopback, or reads a Prometheus. Ratios are
quotients of sums over 1 minute, 5 minutes and since the start of the engines (with delta temporality: since the start
of this command), by model, method and source. It keeps those sums and the latest generations, and stores nothing.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="otel-specdec",
        description="For the people who run engines with speculative decoding.",
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="what would be counted here, and what keeps it from arriving", description=_DOCTOR,
        usage="otel-specdec doctor [options] [-- SERVER COMMAND ...]", epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    doctor.set_defaults(run=_doctor, server=[])
    doctor.add_argument("--json", action="store_true", help="the findings as one JSON object")
    doctor.add_argument(
        "--timeout", type=_seconds, default=2.0, metavar="S", help="for each connection, in seconds (2)"
    )
    doctor.add_argument(
        "--prove", metavar="URL", help="an idle server with an OpenAI-compatible API, as in http://127.0.0.1:8000"
    )
    doctor.add_argument(
        "--prometheus",
        metavar="URL",
        help="with --prove: read the counters from this Prometheus, not from an OTLP port",
    )
    doctor.add_argument(
        "--port", type=_port, default=4318, help="with --prove: the OTLP/HTTP port to listen on, on loopback (4318)"
    )
    doctor.add_argument(
        "--wait", type=_seconds, default=90.0, metavar="S", help="with --prove: for the counters, in seconds (90)"
    )

    watch = commands.add_parser(
        "watch",
        help="pooled ratios, live, in the terminal",
        description=_WATCH,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.set_defaults(run=_watch)
    watch.add_argument("--prometheus", metavar="URL", help="read this Prometheus instead of listening")
    watch.add_argument("--port", type=_port, default=4318, help="the OTLP/HTTP port to listen on, on loopback (4318)")
    watch.add_argument("--model", metavar="TEXT", help="only models whose name contains this")
    watch.add_argument("--once", action="store_true", help="print once, when counters are there, and end")
    watch.add_argument(
        "--collect",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="with --once: listen for so long first, in seconds (0)",
    )
    watch.add_argument(
        "--wait", type=_seconds, default=90.0, metavar="S", help="with --once: for the first counters, in seconds (90)"
    )
    watch.add_argument("--json", action="store_true", help="JSON, one object a line for each refresh")
    watch.add_argument("--refresh", type=_seconds, default=2.0, metavar="S", help="between two screens, in seconds (2)")
    migrate.add_parser(commands)
    return parser


# Imported late: each command needs other things, and `doctor` next to nothing.


def _doctor(options: argparse.Namespace) -> int:
    if options.prove:
        from otel_specdec.cli import prove

        return prove.run(options)
    from otel_specdec.cli import doctor

    return doctor.run(options)


def _watch(options: argparse.Namespace) -> int:
    from otel_specdec.cli import watch

    return watch.run(options)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise ValueError(text)
    return seconds


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise ValueError(text)
    return port


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command line; a wrong one ends by `SystemExit` with 2, and says why."""
    arguments, server = list(arguments), list[str]()
    if "--" in arguments:  # not argparse's own: what it makes of `--` before a rest differs by Python version
        split = arguments.index("--")
        arguments, server = arguments[:split], arguments[split + 1 :]
    parser = _parser()
    options = parser.parse_args(arguments)
    if server:
        if options.command != "doctor" or options.prove:
            parser.error("a server's command line goes with `doctor` alone")
        options.server = server
    if options.command == "doctor" and options.prometheus and not options.prove:
        parser.error("--prometheus goes with --prove")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; see `parse`."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no arrows and bars gets question marks
    try:
        status: int = options.run(options)
        return status
    except BrokenPipeError:
        # Whoever reads has read enough, as `head` does; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:
        return INTERRUPTED
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("google", "opentelemetry", "rich"):
            raise
        print(f"otel-specdec: {error}. Install it: pip install 'otel-specdec[cli]'", file=sys.stderr)
        return USAGE
