"""OpenTelemetry instrumentation for speculative decoding: raw counters, exemplars that name the generation.

The engines' response paths are wrapped by `VLLMSpecDecInstrumentor` and `SGLangSpecDecInstrumentor`, which
`opentelemetry-instrument` finds by itself;
whoever reads counters from responses hands them to a `SpecDecRecorder`. Ratios are computed downstream, from summed
counters; `pool` does so for an in-memory collection. The README has every metric, attribute and environment variable.
"""

from typing import TYPE_CHECKING

from otel_specdec.batches import BatchSummary
from otel_specdec.counts import GenerationReport, SpecCounts
from otel_specdec.instrumentors import SGLangSpecDecInstrumentor, VLLMSpecDecInstrumentor
from otel_specdec.payloads import counts_from_payload, reports_from_payload
from otel_specdec.pooling import Pooled, pool
from otel_specdec.recorder import SpecDecRecorder
from otel_specdec.sessions import CommitRefusedError, RolloutSession
from otel_specdec.streams import StreamedResponse
from otel_specdec.version import __version__

if TYPE_CHECKING:
    from otel_specdec.sdk_exemplars import GenerationExemplarFilter, GenerationExemplarReservoir, views

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


def __getattr__(name: str) -> object:
    """The exemplars' SDK side, imported at first use: the package itself needs no SDK."""
    if name in ("GenerationExemplarFilter", "GenerationExemplarReservoir", "views"):
        from otel_specdec import sdk_exemplars

        value: object = getattr(sdk_exemplars, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
