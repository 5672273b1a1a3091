"""OpenTelemetry instrumentation for speculative decoding: raw counters, exemplars that name the generation.

The engines' response paths are wrapped by `VLLMSpecDecInstrumentor` and `SGLangSpecDecInstrumentor`, which
`opentelemetry-instrument` finds by itself;
whoever reads counters from responses hands them to a `SpecDecRecorder`. Ratios are computed downstream, from summed
counters; `pool` does so for an in-memory collection. The README has every metric, attribute and environment variable.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from otel_specdec.version import __version__

if TYPE_CHECKING:
    from otel_specdec.batches import BatchSummary
    from otel_specdec.counts import GenerationReport, SpecCounts
    from otel_specdec.instrumentors import SGLangSpecDecInstrumentor, VLLMSpecDecInstrumentor
    from otel_specdec.payloads import counts_from_payload, reports_from_payload
    from otel_specdec.pooling import Pooled, pool
    from otel_specdec.recorder import SpecDecRecorder
    from otel_specdec.sdk_exemplars import GenerationExemplarFilter, GenerationExemplarReservoir, views
    from otel_specdec.sessions import CommitRefusedError, RolloutSession
    from otel_specdec.streams import StreamedResponse

__all__ = [
    "BatchSummary",
    "CommitRefusedError",
    "GenerationExemplarFilter",
    "GenerationExemplarReservoir",
    "GenerationReport",
    "Pooled",
    "RolloutSession",
    "SGLangSpecDecInstrumentor",
    "SpecCounts",
    "SpecDecRecorder",
    "StreamedResponse",
    "VLLMSpecDecInstrumentor",
    "__version__",
    "counts_from_payload",
    "pool",
    "reports_from_payload",
    "views",
]

# Imported at first use: every process under `opentelemetry-instrument` imports this package and needs the instrumentors
# alone, and the exemplars' SDK side needs an SDK, which the package does not.
_MODULES = {
    "BatchSummary": "batches",
    "CommitRefusedError": "sessions",
    "GenerationExemplarFilter": "sdk_exemplars",
    "GenerationExemplarReservoir": "sdk_exemplars",
    "GenerationReport": "counts",
    "Pooled": "pooling",
    "RolloutSession": "sessions",
    "SGLangSpecDecInstrumentor": "instrumentors",
    "SpecCounts": "counts",
    "SpecDecRecorder": "recorder",
    "StreamedResponse": "streams",
    "VLLMSpecDecInstrumentor": "instrumentors",
    "counts_from_payload": "payloads",
    "pool": "pooling",
    "reports_from_payload": "payloads",
    "views": "sdk_exemplars",
}


def __getattr__(name: str) -> object:
    """A public name, from its module."""
    if name in _MODULES:
        value: object = getattr(import_module(f"otel_specdec.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
