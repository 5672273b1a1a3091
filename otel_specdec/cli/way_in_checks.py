"""How the hooks get into the processes that count: entry points, auto-instrumentation, opt-outs."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from otel_specdec import provider
from otel_specdec.cli import sources
from otel_specdec.cli.findings import Finding, State, Topic
from otel_specdec.cli.setup import SGLANG, VLLM, Setup, version_of

INSTRUMENTORS: Final = "opentelemetry_instrumentor"
AUTO: Final = "opentelemetry-instrumentation"
_LAST_THAT_STRIPS: Final = (0, 62, 1)
"""opentelemetry-instrumentation to 0.62b1 takes itself off PYTHONPATH at start-up: children begin without it."""

WAY_IN: Final = Topic("The way into the engine's processes")


def opt_outs(setup: Setup) -> Iterator[Finding]:
    """Variables that switch off."""
    environ = setup.environ
    if provider.sdk_disabled(environ):
        yield WAY_IN.problem(
            "sdk_disabled",
            "OTEL_SDK_DISABLED=true switches everything off.",
            "Unset OTEL_SDK_DISABLED.",
        )
    for engine in setup.engines:
        if provider.instrumentation_disabled(engine.entry_point, environ):
            yield WAY_IN.problem(
                f"disabled.{engine.name}",
                f"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS names {engine.entry_point} or *: {engine.shown} is not hooked.",
                f"Take {engine.entry_point} (or *) off it.",
            )


def entry_points(setup: Setup) -> Iterator[Finding]:
    """Whether this Python finds ours."""
    wanted = [(group, each.entry_point) for each in (VLLM, SGLANG) for group in (INSTRUMENTORS, each.plugins)]
    lacking = [f"{name} in {group}" for group, name in wanted if not metadata.entry_points(group=group, name=name)]
    if lacking:
        yield WAY_IN.problem(
            "entry_points",
            f"Entry points of otel-specdec are not found by this Python: {', '.join(lacking)}.",
            "Install the package itself (pip install otel-specdec): a folder on PYTHONPATH has no entry points.",
        )
    else:
        yield WAY_IN.ok(
            "entry_points",
            f"Both entry points of each engine are found: by {INSTRUMENTORS}, and by {VLLM.plugins} and "
            f"{SGLANG.plugins}. Both together hook once.",
        )


def plugins(setup: Setup) -> Iterator[Finding]:
    """Whether the engine loads its plugin of ours."""
    for engine in setup.engines:
        chosen = setup.environ.get(engine.chosen_by)
        allowed = [name.strip() for name in (chosen or "").split(",") if name.strip()]
        # vLLM takes an empty variable for an empty list, SGLang for none.
        if (allowed or (chosen is not None and engine is VLLM)) and engine.entry_point not in allowed:
            yield WAY_IN.warning(
                f"plugin.{engine.name}",
                f"{engine.chosen_by} does not name {engine.entry_point}: {engine.shown} does not load the plugin, and "
                "only `opentelemetry-instrument` gets in.",
                f"Add {engine.entry_point} to {engine.chosen_by}.",
            )
        elif find_spec(engine.name) is not None and sources.source_of(engine.loader) is None:
            yield WAY_IN.finding(
                f"plugin.{engine.name}",
                State.PROBLEM if setup.instrumented is False else State.NOTE,
                f"This {engine.shown} loads no plugins (SGLang does from 0.5.14 on): only `opentelemetry-instrument` "
                "gets in.",
                "Start the server under `opentelemetry-instrument`.",
            )


def auto_instrumentation(setup: Setup) -> Iterator[Finding]:
    """Whether `opentelemetry-instrument` is there, and sets up what it should."""
    number = version_of(AUTO) or "unknown"
    if setup.instrumented is False:
        yield WAY_IN.note(
            "auto",
            "The server does not run under `opentelemetry-instrument`: it is counted by the engine's own plugin, "
            "where metrics are asked for.",
            "Put `opentelemetry-instrument` in front where the plugin does not get in (SGLang's tokenizer workers).",
        )
        return
    program = Path(sys.executable).with_name("opentelemetry-instrument")
    if not program.exists() and not shutil.which("opentelemetry-instrument"):
        yield WAY_IN.warning(
            "auto",
            f"{AUTO} {number} is installed, its command `opentelemetry-instrument` is not found.",
            f"pip install --force-reinstall {AUTO}, or put this environment's bin folder on PATH.",
        )
    elif not setup.has_distro:
        yield WAY_IN.warning(
            "auto",
            f"`opentelemetry-instrument` {number} is here without a distribution that sets the SDK up: it makes no "
            "MeterProvider, and otel-specdec makes its own where metrics are asked for.",
            "pip install opentelemetry-distro, if anything else is to be exported too.",
        )
    else:
        yield WAY_IN.ok("auto", f"`opentelemetry-instrument` {number}, with a distribution that sets the SDK up.")


def children(setup: Setup) -> Iterator[Finding]:
    """Whether processes that the server starts are reached."""
    if setup.instrumented is False and SGLANG not in setup.engines:
        return
    number = version_of(AUTO) or ""
    parsed = re.match(r"(\d+)\.(\d+)(?:b(\d+))?", number)
    release = tuple(int(each or 0) for each in parsed.groups()) if parsed else None
    workers = setup.command.number("tokenizer-worker-num") if setup.command else None
    if setup.instrumented is False:
        if (workers or 1) > 1:
            yield WAY_IN.problem(
                "children",
                f"{workers} tokenizer workers, and SGLang loads no plugins there: nothing is counted.",
                "Start the server under `opentelemetry-instrument`.",
            )
        return
    if release is None:
        yield WAY_IN.warning(
            "children",
            f"Whether {AUTO} {number} reaches child processes is not known.",
            "Look for the line of otel_specdec in the server's log.",
        )
    elif release > _LAST_THAT_STRIPS:
        yield WAY_IN.ok(
            "children",
            f"{AUTO} {number} reaches the processes that the server starts (engine cores, tokenizer workers).",
        )
    else:
        reached = "The engines' plugins get into engine cores all the same"
        if SGLANG in setup.engines and (workers or 2) > 1:
            state, but = (State.PROBLEM if workers else State.WARNING), ", but not into SGLang's tokenizer workers"
            but += f": with {workers} of them nothing is counted." if workers else " (--tokenizer-worker-num above 1)."
        else:
            state, but = State.WARNING, ", with a MeterProvider of their own."
        yield WAY_IN.finding(
            "children",
            state,
            f"{AUTO} {number} does not reach child processes: to 0.62b1 it takes itself off PYTHONPATH. {reached}{but}",
            f"pip install --upgrade {AUTO} opentelemetry-distro opentelemetry-sdk",
        )
