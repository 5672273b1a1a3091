"""Which engines are here, whether their hooks are, and what of a server is not seen."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import Final

from otel_specdec.cli.findings import Finding, Topic
from otel_specdec.cli.setup import SGLANG, VLLM, Engine, Setup, version_of
from otel_specdec.version import __version__

PACKAGE: Final = Topic("Package")
ENGINES: Final = Topic("Engines")


def package(setup: Setup) -> Iterator[Finding]:
    """This package, and the Python that is looked at."""
    yield PACKAGE.ok(
        "package",
        f"otel-specdec {__version__} on Python {platform.python_version()} ({sys.prefix}).",
    )


def engines(setup: Setup) -> Iterator[Finding]:
    """Which engines are here, in which version, with which hooks."""
    if setup.command and not setup.command.engine:
        yield ENGINES.warning(
            "command",
            "The command line names neither vllm nor sglang.",
            "Give the doctor the whole command line of the server, as it stands in its start script.",
        )
    if not setup.engines:
        named = setup.command.engine if setup.command else None
        lacking = f"{named} is not" if named else "neither vLLM nor SGLang is"
        yield ENGINES.warning(
            "engine",
            f"No engine to instrument: {lacking} installed for this Python.",
            "Run the doctor with the Python of the server. Rollouts and gateways need no engine here: SpecDecRecorder "
            "counts from responses.",
        )
    for engine in setup.engines:
        yield from _engine(setup, engine)
    if SGLANG in setup.engines:
        yield from _unseen_modes(setup)
    if VLLM in setup.engines and setup.environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        yield ENGINES.warning(
            "vllm.rust_front_end",
            "VLLM_USE_RUST_FRONTEND is on: everything is counted but for trimmed tokens, which it alone knows.",
            "Unset it where completion less trimmed has to be what clients got.",
        )


def _engine(setup: Setup, engine: Engine) -> Iterator[Finding]:
    found = [f"{name} {number}" for name in engine.distributions if (number := version_of(name))]
    what = ", ".join(found) if found else f"{engine.name}, a source tree on the path"
    check = f"engine.{engine.name}"
    try:
        differences, front_end = engine.differences(), engine.front_end()
    except (SyntaxError, ValueError) as error:
        differences, front_end, why = None, [], f"its source cannot be read ({error})"
    else:
        why = "its source is not here"
    if differences is None:
        yield ENGINES.warning(
            check,
            f"{engine.shown}: {what}. The doctor could not look for the hooks: {why}.",
            f"Look for the line `otel_specdec counts speculative decoding of {engine.name}` in the server's log.",
        )
    elif differences:
        yield ENGINES.problem(
            check,
            f"{engine.shown}: {what}. Its hooks are not as otel-specdec {__version__} knows them "
            f"({'; '.join(differences)}): nothing is counted, and the engine is left as it is.",
            "Upgrade otel-specdec (pip install --upgrade otel-specdec); if this is its newest version, please report "
            "it.",
        )
    else:
        yield ENGINES.ok(check, f"{engine.shown}: {what}. Every hook is there, by its source.")
    if differences == [] and front_end:
        yield ENGINES.warning(
            f"{check}.front_end",
            f"{engine.shown}'s front end is not as otel-specdec {__version__} knows it ({'; '.join(front_end)}): "
            "everything is counted but for trimmed tokens.",
            "Upgrade otel-specdec (pip install --upgrade otel-specdec); if this is its newest version, please report "
            "it.",
        )


def _unseen_modes(setup: Setup) -> Iterator[Finding]:
    """SGLang's answers that do not come through the TokenizerManager."""
    option = setup.command.option if setup.command else lambda *_: None
    if setup.environ.get("SGLANG_RUST_SERVER", "").strip().lower() in ("1", "true", "yes", "y"):
        yield ENGINES.problem(
            "sglang.rust_server",
            "SGLANG_RUST_SERVER is on: answers do not come through the TokenizerManager, so nothing is counted.",
            "Unset it, or count from responses with SpecDecRecorder.",
        )
    if option("smg-grpc-mode", "grpc-mode") is not None:
        yield ENGINES.problem(
            "sglang.grpc_mode",
            "--smg-grpc-mode: answers do not come through the TokenizerManager, so nothing is counted.",
            "Serve over HTTP, or count from responses with SpecDecRecorder.",
        )
    if option("disaggregation-mode") == "prefill":
        yield ENGINES.note(
            "sglang.prefill",
            "The prefill side of a disaggregated server counts nothing: each of its requests is a generation of the "
            "decode side.",
            "Instrument the decode side.",
        )
    if setup.command is None:
        yield ENGINES.note(
            "sglang.modes",
            "SGLang is not seen with SGLANG_RUST_SERVER=1, with --smg-grpc-mode, and on the prefill side of a "
            "disaggregated server.",
            "Give the doctor the server's command line, after `--`, and it looks for them.",
        )


def speculation(setup: Setup) -> Iterator[Finding]:
    """Whether the server's command line asks for it."""
    if not setup.command or not setup.command.engine or not setup.engines:
        return
    speculates = setup.command.speculates
    if speculates:
        yield ENGINES.ok("speculation", "The command line asks for speculative decoding.")
        return
    option = "--speculative-config" if setup.command.engine == "vllm" else "--speculative-algorithm"
    yield ENGINES.warning(
        "speculation",
        f"The command line has no {option}{'' if speculates is False else '; its --config file may'}: without "
        "speculation there is not one point.",
        f"Give the server {option}.",
    )
