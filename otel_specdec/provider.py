"""A MeterProvider for an engine process that has none, and flushes that no engine waits for.

Engines start processes of their own (vLLM's EngineCore), which auto-instrumentation may not reach: then the engine's
own plugin mechanism loads us, and the standard environment variables say whether and where metrics are wanted. The
SDK is imported only where a provider is really made.

Threads: `Flusher` has one daemon thread, started with the first engine; the engine's thread only sets an event.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

logger = logging.getLogger("otel_specdec")

IDLE_SECONDS: Final = 0.5
"""An engine that stays idle for so long is flushed: vLLM's default shutdown kills EngineCore at once."""

FLUSH_MILLIS: Final = 5_000
"""How long a flush of ours may take, in milliseconds, and a process that ends wait for it."""


def metrics_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for metrics: by an exporter other than `none`, or by an OTLP metrics endpoint."""
    if sdk_disabled(environ):
        return False
    exporters = _exporters(environ)
    if exporters:
        return any(name.lower() != "none" for name in exporters)
    return bool(environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "").strip())


def sdk_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether OTEL_SDK_DISABLED switches everything off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def instrumentation_disabled(entry_point: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether OTEL_PYTHON_DISABLED_INSTRUMENTATIONS names this entry point, or `*`."""
    disabled = {name.strip() for name in environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    return entry_point in disabled or "*" in disabled


_CHECK: Final = "Check OTEL_METRICS_EXPORTER, OTEL_EXPORTER_OTLP_PROTOCOL and what is installed."
_ONE_PORT: Final = (
    "It listens on one port, which another process of this engine has: have metrics pushed instead, by "
    "OTEL_METRICS_EXPORTER=otlp, into a collector or Prometheus' own OTLP receiver."
)


def provider_from_environment(environ: Mapping[str, str] = os.environ) -> MeterProvider | None:
    """A provider of our own, made as the environment says and never set as the global one; None where it cannot be.

    Reads OTEL_METRICS_EXPORTER (`otlp`, `console`, or any name of the entry point group
    `opentelemetry_metrics_exporter`; `otlp` where only the endpoint is given) and
    OTEL_EXPORTER_OTLP_(METRICS_)PROTOCOL (`grpc`, the SDK's default, or `http/protobuf`); resource, endpoint, headers
    and interval are read by the SDK and the exporter themselves.
    """
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    except ImportError as error:
        logger.warning(
            "otel_specdec: metrics are asked for, but the OpenTelemetry SDK cannot be imported (%s): "
            "nothing is counted. Install otel-specdec[sdk] and an exporter.",
            error,
        )
        return None
    readers: list[MetricReader] = []
    for name in exporter_entry_points(environ):
        try:
            (entry_point,) = entry_points(group="opentelemetry_metrics_exporter", name=name)
            made: Any = entry_point.load()()
            readers.append(made if isinstance(made, MetricReader) else PeriodicExportingMetricReader(made))
        except Exception as error:
            logger.warning(
                "otel_specdec: the metrics exporter %r cannot be made (%s: %s): nothing is exported to it. %s",
                name,
                type(error).__name__,
                error,
                _ONE_PORT if name.lower() == "prometheus" else _CHECK,
            )
    if not readers:
        return None
    provider = MeterProvider(metric_readers=readers)
    install_exemplars(provider)
    return provider


def install_exemplars(provider: MeterProvider) -> None:
    """Have exemplars name generations on a provider that takes no views from its user. Never raises."""
    if type(provider).__module__.startswith("opentelemetry.sdk."):
        from otel_specdec.sdk_exemplars import install

        install(provider)


def exporter_entry_points(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The names in the group `opentelemetry_metrics_exporter` that the environment means (see above)."""
    asked = (name for name in _exporters(environ) or ["otlp"] if name.lower() != "none")
    return [_otlp_exporter(environ) if name.lower() == "otlp" else name for name in asked]


def _exporters(environ: Mapping[str, str]) -> list[str]:
    return [name for each in environ.get("OTEL_METRICS_EXPORTER", "").split(",") if (name := each.strip())]


def _otlp_exporter(environ: Mapping[str, str]) -> str:
    protocol = environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol:
        return "otlp_proto_http" if protocol.strip().lower().startswith("http") else "otlp_proto_grpc"
    installed = {point.name for point in entry_points(group="opentelemetry_metrics_exporter")}
    return "otlp_proto_grpc" if "otlp_proto_grpc" in installed else "otlp_proto_http"


def is_auto_instrumented() -> bool:
    """Whether `opentelemetry-instrument` (or its `initialize()`) set this process up, and so made its provider."""
    return "opentelemetry.instrumentation.auto_instrumentation" in sys.modules


class Flusher:
    """Flushes a provider off the engine's thread: once after births, whenever the engine stays idle, and at the end."""

    def __init__(self, provider: MeterProvider, *, when_idle: bool) -> None:
        self._provider = provider
        self._when_idle = when_idle
        self._engines: list[Callable[[], bool]] = []
        self._wanted = threading.Event()
        self._born = False
        if when_idle:
            threading.Thread(target=self._run, name="otel-specdec-flush", daemon=True).start()
        _at_exit(self)

    def watch(self, is_idle: Callable[[], bool]) -> None:
        """An engine has come up and its series are born: flush them, and watch it."""
        self._engines.append(is_idle)
        self._born = True
        self._wanted.set()

    def idle(self) -> None:
        """The engine has nothing to do just now. Costs the engine's thread one look at a flag, and seldom more."""
        if not self._wanted.is_set():
            self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if not self._born:  # births go out at once, an idle engine is given the time to get its next request
                time.sleep(IDLE_SECONDS)
            self._wanted.clear()
            try:
                if self._born or all(is_idle() for is_idle in self._engines):
                    self._born = False
                    _force_flush(self._provider)
            except Exception as error:  # a collector that is away is the exporter's affair, and it says so itself
                logger.debug("otel_specdec could not flush: %s", error)

    def at_exit(self) -> None:
        """One last flush, bounded: on its own thread, as a fork may have left the SDK's locks taken for ever."""
        flush = threading.Thread(target=_quiet_flush, args=(self._provider,), daemon=True)
        flush.start()
        flush.join(FLUSH_MILLIS / 1000)


def _force_flush(provider: Any) -> None:
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        force_flush(timeout_millis=FLUSH_MILLIS)


def _quiet_flush(provider: Any) -> None:
    try:
        _force_flush(provider)
    except Exception as error:
        logger.debug("otel_specdec could not flush at exit: %s", error)


def _at_exit(flusher: Flusher) -> None:
    """Flush when this process ends in an orderly way.

    The SDK does so by `atexit`, which a forked `multiprocessing` child does not run (it ends by `os._exit`): there, and
    there only, an application's own provider is flushed too, since nobody else would.
    """
    import multiprocessing  # here: it is some ms, and only engines need it
    from multiprocessing.util import Finalize

    if multiprocessing.parent_process() is None:
        return
    pid = os.getpid()

    def last_flush() -> None:
        if os.getpid() == pid:
            flusher.at_exit()

    Finalize(None, last_flush, exitpriority=100)
