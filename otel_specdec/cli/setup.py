"""What the doctor looks at: this environment, its variables and engines, and a server's command line if given."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Final

from otel_specdec import provider
from otel_specdec.cli import sources
from otel_specdec.cli.server_command import ServerCommand
from otel_specdec.engines import sglang, vllm, vllm_front_end
from otel_specdec.package import SGLANG_DISTRIBUTIONS, VLLM_DISTRIBUTIONS

SDK: Final = "opentelemetry-sdk"


@dataclass(frozen=True)
class Engine:
    """What the doctor knows of one engine, beyond its adapter."""

    name: str
    shown: str
    distributions: tuple[str, ...]
    entry_point: str
    plugins: str
    """The entry point group of its own plugins."""
    chosen_by: str
    """The variable that names the plugins to load."""
    loader: str
    """The module that loads them; a version without it loads none."""
    differences: Callable[[], list[str] | None]
    """What the hooks lack, by its source; None where that could not be looked at."""
    front_end: Callable[[], list[str]] = list
    """What those lack without which trimmed tokens alone are not counted."""


def _vllm_differences() -> list[str] | None:
    source = sources.source_of(vllm.SCHEDULER_MODULE)
    return None if source is None else vllm.differences(sources.outline(source, "Scheduler"))


def _vllm_front_end() -> list[str]:
    found = []
    for module, (kind, *_) in vllm_front_end.PLACES.items():
        source = sources.source_of(module)
        if source is not None and (lacking := vllm_front_end.difference(module, sources.outline(source, kind))):
            found.append(lacking)
    return found


def _sglang_differences() -> list[str] | None:
    manager, messages = map(sources.source_of, (sglang.TOKENIZER_MODULE, sglang.MESSAGES_MODULE))
    if manager is None or messages is None:
        return None
    columns = next(filter(None, (sources.fields(messages, name) for name in sglang.MESSAGE_CLASSES)), frozenset[str]())
    return sglang.differences(sources.outline(manager, "TokenizerManager"), columns)


VLLM: Final = Engine(
    name="vllm",
    shown="vLLM",
    distributions=VLLM_DISTRIBUTIONS,
    entry_point="specdec_vllm",
    plugins="vllm.general_plugins",
    chosen_by="VLLM_PLUGINS",
    loader="vllm.plugins",
    differences=_vllm_differences,
    front_end=_vllm_front_end,
)
SGLANG: Final = Engine(
    name="sglang",
    shown="SGLang",
    distributions=SGLANG_DISTRIBUTIONS,
    entry_point="specdec_sglang",
    plugins="sglang.srt.plugins",
    chosen_by="SGLANG_PLUGINS",
    loader="sglang.srt.plugins",
    differences=_sglang_differences,
)


class Setup:
    """What is looked at: this environment, its variables, and the server's command line where it was given."""

    def __init__(self, command: ServerCommand | None, seconds: float, environ: Mapping[str, str] = os.environ) -> None:
        self.command = command
        self.seconds = seconds
        self.environ = environ

    @cached_property
    def engines(self) -> list[Engine]:
        """Those installed here; with a server's command line the one that it starts."""
        named = self.command.engine if self.command else None
        return [each for each in (VLLM, SGLANG) if is_there(each) and named in (None, each.name)]

    @property
    def instrumented(self) -> bool | None:
        """Whether the server runs under `opentelemetry-instrument`; None where its command line is not known."""
        return self.command.instrumented if self.command else None

    @cached_property
    def has_distro(self) -> bool:
        """Whether `opentelemetry-instrument` would make providers, and export where nothing says otherwise."""
        return bool(entry_points(group="opentelemetry_configurator"))

    @cached_property
    def environ_when_instrumented(self) -> Mapping[str, str]:
        """The variables as opentelemetry-distro completes them."""
        defaults = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"} if self.has_distro else {}
        return {**defaults, **self.environ}

    @cached_property
    def exporters(self) -> list[str]:
        """The entry points of the exporters that the server would use; none where no metrics are asked for.

        Where its command line is not known and no variable asks: as under `opentelemetry-instrument`.
        """
        environ = self.environ
        if self.instrumented or (self.instrumented is None and not provider.metrics_asked_for(environ)):
            environ = self.environ_when_instrumented
        return provider.exporter_entry_points(environ) if provider.metrics_asked_for(environ) else []


def is_there(engine: Engine) -> bool:
    """Whether it is installed, or a source tree of it is on the path."""
    return any(map(version_of, engine.distributions)) or find_spec(engine.name) is not None


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def has_sdk() -> bool:
    """Whether there is an OpenTelemetry SDK."""
    try:
        importlib.import_module("opentelemetry.sdk.metrics")
    except ImportError:
        return False
    return True


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """The warnings of a logger, kept from the terminal."""
    log, handler = logging.getLogger(logger), _Warnings()
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
