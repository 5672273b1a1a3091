"""Whose series they are, whether a view doubles them, and whether exemplars name generations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from otel_specdec import names, provider
from otel_specdec.cli.findings import Finding, Topic
from otel_specdec.cli.setup import SDK, SGLANG, VLLM, Setup, has_sdk, version_of, warnings_of

SERIES: Final = Topic("Series")
EXEMPLARS: Final = Topic("Exemplars")


def resource(setup: Setup) -> Iterator[Finding]:
    """Whose series they are."""
    if not has_sdk() or provider.sdk_disabled(setup.environ):
        return
    from opentelemetry.sdk.resources import Resource

    attributes = Resource.create().attributes
    service = str(attributes.get("service.name", ""))
    if service.startswith("unknown_service"):
        yield SERIES.warning(
            "service_name",
            f"The resource is called {service}: its series are nobody's.",
            "export OTEL_SERVICE_NAME=my-server",
        )
    given = "service.instance.id=" in setup.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    instance = attributes.get("service.instance.id")
    if instance and given:
        yield SERIES.note(
            "instance_id",
            f"service.instance.id is {instance}, from the environment. Processes of one server are kept apart by "
            f"{names.PROCESS}; two servers with this id (in one pod, say) would write into the same series.",
            "Give each server of a pod an id of its own: OTEL_RESOURCE_ATTRIBUTES=service.instance.id=$POD-$PORT",
        )
    elif instance:
        yield SERIES.ok(
            "instance_id", "The SDK gives each process a random service.instance.id: no two share a series."
        )
    else:
        yield SERIES.note(
            "instance_id",
            f"The resource has no service.instance.id: {names.PROCESS} ends in random digits instead, so that each "
            "start of a server makes new series.",
            "OTEL_RESOURCE_ATTRIBUTES=service.instance.id=…, another one for each server, also for two in one pod.",
        )


def views(setup: Setup) -> Iterator[Finding]:
    """What can be known of views that are not ours."""
    file = next(
        (name for name in ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE") if setup.environ.get(name)), None
    )
    if file:
        yield SERIES.warning(
            "views",
            f"{file} is set: the doctor does not read it. A view in it that matches our instruments, as * does, would "
            "double their sums beside ours.",
            f"Exclude the meter {names.METER} from such a view.",
        )
    else:
        yield SERIES.note(
            "views",
            "Views are made in code, where the doctor cannot see them. An application's own view that matches our "
            'instruments (View("*", …) does) makes a second stream beside that of views(), and sums are doubled.',
            "Nothing under `opentelemetry-instrument`, which takes no views. Else see help(otel_specdec.views).",
        )


def generation_ids(environ: Mapping[str, str] = os.environ) -> tuple[bool, Sequence[str]]:
    """Whether a generation's id comes out of a MeterProvider made and furnished as under `opentelemetry-instrument`.

    It really counts one, in memory. With it come the warnings that were given.
    """
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder

    with warnings_of("otel_specdec") as told:
        reader: Any = InMemoryMetricReader()
        made = MeterProvider([reader], shutdown_on_exit=False)
        provider.install_exemplars(made)
        SpecDecRecorder(made).record(GenerationReport("doctor", SpecCounts(1, 2, 1, 3, 2)))
        collected = reader.get_metrics_data()
        made.shutdown()
    exemplars = [
        exemplar
        for resource in collected.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        for exemplar in point.exemplars
    ]
    return any(each.filtered_attributes.get(names.RESPONSE_ID) == "doctor" for each in exemplars), told


def exemplars(setup: Setup) -> Iterator[Finding]:
    """Whether they will name generations."""
    if not has_sdk() or provider.sdk_disabled(setup.environ):
        return
    variable = "OTEL_METRICS_EXEMPLAR_FILTER"
    chosen = setup.environ.get(variable, "").strip().lower()
    if chosen == "always_off":
        yield EXEMPLARS.warning(
            "exemplars",
            f"{variable}=always_off: no exemplars, so no generation ids.",
            f"Unset {variable} if you want to get from a graph to a generation.",
        )
        return
    if chosen == "trace_based":
        yield EXEMPLARS.note(
            "exemplars",
            f"{variable}=trace_based: only generations of sampled traces have exemplars.",
            f"Unset {variable} for those of all generations.",
        )
        return
    try:
        appears, told = generation_ids()
    except Exception as error:  # an SDK that we do not know may raise anything
        appears, told = False, [f"{type(error).__name__}: {error}"]
    if appears:
        yield EXEMPLARS.ok(
            "exemplars",
            "Exemplars name generations (one was counted here, in memory, and came out with its "
            f"id){_FILTER.get(chosen, '')}.",
        )
    else:
        yield EXEMPLARS.warning(
            "exemplars",
            f"Exemplars will not name generations with OpenTelemetry SDK {version_of(SDK)}: "
            f"{' '.join(told) or 'no id came out'}.",
            "The counters are right all the same. Upgrade otel-specdec; if this is its newest version, please report "
            "it.",
        )


_FILTER: Final = {"always_on": ", and every other measurement may have one (always_on)"}


def traces(setup: Setup) -> Iterator[Finding]:
    """Whether they will name traces."""
    if VLLM in setup.engines and not (setup.command and setup.command.option("otlp-traces-endpoint") is not None):
        yield EXEMPLARS.note(
            "trace_headers",
            "vLLM 0.32 drops a request's trace headers unless it is started with --otlp-traces-endpoint: exemplars "
            "then have ids and no traces.",
            "Add --otlp-traces-endpoint URL if clients send traceparent.",
        )
    if SGLANG in setup.engines and not (setup.command and setup.command.option("enable-trace") is not None):
        yield EXEMPLARS.note(
            "trace_sglang",
            "SGLang keeps a request's trace only with --enable-trace: exemplars otherwise have ids and no traces.",
            "Add --enable-trace if clients send traceparent.",
        )
