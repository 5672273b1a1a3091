"""Whether metrics leave the processes that count: SDK, exporter, protocol, endpoint, temporality."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final

from otel_specdec import provider
from otel_specdec.cli import endpoints
from otel_specdec.cli.findings import Finding, State, Topic
from otel_specdec.cli.setup import SDK, Setup, has_sdk, version_of

EXPORTERS: Final = "opentelemetry_metrics_exporter"

EXPORT: Final = Topic("Export")


def sdk(setup: Setup) -> Iterator[Finding]:
    """Whether there is one."""
    if has_sdk():
        yield EXPORT.ok("sdk", f"OpenTelemetry SDK {version_of(SDK)}.")
    else:
        yield EXPORT.problem(
            "sdk",
            "There is no OpenTelemetry SDK: everything works, and emits nothing.",
            "pip install 'otel-specdec[sdk]' opentelemetry-distro opentelemetry-exporter-otlp",
        )


def asked_for(setup: Setup) -> Iterator[Finding]:
    """Whether anything asks for metrics."""
    environ, exporter = setup.environ, setup.environ.get("OTEL_METRICS_EXPORTER", "")
    if provider.sdk_disabled(environ):
        return
    ask = "export OTEL_METRICS_EXPORTER=otlp"
    if exporter.strip() and not provider.metrics_asked_for(environ):
        yield EXPORT.problem("asked_for", f"OTEL_METRICS_EXPORTER={exporter}: no metrics are exported.", ask)
    elif provider.metrics_asked_for(environ):
        by = f"OTEL_METRICS_EXPORTER={exporter}" if exporter.strip() else "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
        yield EXPORT.ok("asked_for", f"Metrics are asked for ({by}).")
    elif setup.instrumented and provider.metrics_asked_for(setup.environ_when_instrumented):
        yield EXPORT.ok("asked_for", "Metrics are exported by OTLP: the default of opentelemetry-distro.")
    elif setup.instrumented is None and setup.has_distro:
        yield EXPORT.warning(
            "asked_for",
            "No variable asks for metrics. Under `opentelemetry-instrument` they are exported by OTLP all the same; "
            "the engines' plugins start nothing.",
            ask,
        )
    else:
        yield EXPORT.problem(
            "asked_for",
            "No variable asks for metrics: nothing is started, and nothing counted. (OTEL_EXPORTER_OTLP_ENDPOINT "
            "alone asks for none.)",
            ask,
        )


def exporters(setup: Setup) -> Iterator[Finding]:
    """Whether what is asked for is installed, and can be loaded."""
    for name in setup.exporters:
        check = f"exporter.{name}"
        found = list(entry_points(group=EXPORTERS, name=name))
        if not found:
            yield EXPORT.problem(
                check,
                f"The metrics exporter {name} is not installed: nothing is exported to it.",
                "pip install opentelemetry-exporter-otlp"
                if name in _PROTOCOLS
                else "Install its package, or correct OTEL_METRICS_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL.",
            )
            continue
        try:
            found[0].load()
        except Exception as error:  # whatever a package of somebody else's raises at import
            yield EXPORT.problem(
                check,
                f"The metrics exporter {name} cannot be loaded ({type(error).__name__}: {error}).",
                f"Install {found[0].dist.name if found[0].dist else 'its package'} again, in versions that go "
                "together.",
            )
            continue
        yield EXPORT.ok(check, f"Exporter {name}{_PROTOCOLS.get(name, '')}, from {found[0].value.split(':')[0]}.")
        if name == "prometheus":
            yield EXPORT.finding(
                "prometheus_port",
                State.PROBLEM if setup.instrumented else State.WARNING,
                "The exporter prometheus opens one port in every process: under `opentelemetry-instrument` the "
                "server's first process takes it, and the engine core or second worker, which counts, finds it taken.",
                "Export by OTLP (OTEL_METRICS_EXPORTER=otlp), to Prometheus 3 itself or to a collector.",
            )
    if setup.exporters and setup.instrumented is not False and setup.has_distro:
        yield from _when_instrumented(setup)


_PROTOCOLS: Final = {endpoints.GRPC: " (protocol grpc)", endpoints.HTTP: " (protocol http/protobuf)"}


def _when_instrumented(setup: Setup) -> Iterator[Finding]:
    """Where `opentelemetry-instrument` takes another exporter than the plugins do, and gives up."""
    environ = setup.environ_when_instrumented
    protocol = environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or environ["OTEL_EXPORTER_OTLP_PROTOCOL"]
    under = provider.exporter_entry_points(environ)
    if protocol.strip() not in ("grpc", "http/protobuf"):
        yield EXPORT.problem(
            "protocol",
            f"`opentelemetry-instrument` knows no protocol {protocol}: it sets nothing up.",
            "export OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        )
    elif under != setup.exporters and not all(entry_points(group=EXPORTERS, name=name) for name in under):
        yield EXPORT.warning(
            "protocol",
            f"No protocol is set: `opentelemetry-instrument` asks for {', '.join(under)}, which is not installed, and "
            "sets nothing up.",
            "export OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        )


def reachable(setup: Setup) -> Iterator[Finding]:
    """Whether metrics get through to the endpoint."""
    for name in setup.exporters:
        if name in (endpoints.GRPC, endpoints.HTTP) and entry_points(group=EXPORTERS, name=name):
            answer = endpoints.ask(name, setup.seconds, setup.environ)
            state = {True: State.OK, False: State.PROBLEM, None: State.WARNING}[answer.reachable]
            yield EXPORT.finding("endpoint", state, answer.says, answer.do)


def temporality(setup: Setup) -> Iterator[Finding]:
    """What counters go out as."""
    variable = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    preference = setup.environ.get(variable, "").strip().lower()
    if preference in ("delta", "lowmemory"):
        yield EXPORT.warning(
            "temporality",
            f"{variable}={preference}: counters go out as deltas. Prometheus refuses them, and one lost export is "
            "lost.",
            f"Unset {variable}, or send to the collector pipeline, which makes them cumulative (and keeps 1 exemplar "
            "in 8).",
        )
    elif {endpoints.GRPC, endpoints.HTTP}.intersection(setup.exporters):
        yield EXPORT.ok("temporality", "Counters go out as cumulative values, as Prometheus takes them.")
