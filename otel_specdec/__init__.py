"""OpenTelemetry instrumentation for speculative decoding: raw counters, exemplars that name the generation.

The engines' response paths are wrapped by `VLLMSpecDecInstrumentor`, which `opentelemetry-instrument` finds by itself;
whoever reads counters from responses hands them to a `SpecDecRecorder`. Ratios are computed downstream, from summed
counters; `pool` does so for an in-memory collection. The README has every metric, attribute and environment variable.
"""

from typing import TYPE_CHECKING

from otel_specdec.counts import GenerationReport, SpecCounts
from otel_specdec.instrumentors import VLLMSpecDecInstrumentor
from otel_specdec.pooling import Pooled, pool
from otel_specdec.recorder import SpecDecRecorder
from otel_specdec.version import __version__

if TYPE_CHECKING:
    from otel_specdec.sdk_exemplars import GenerationExemplarFilter, GenerationExemplarReservoir, views

__all__ = [
    "GenerationExemplarFilter",
    "GenerationExemplarReservoir",
    "GenerationReport",
    "Pooled",
    "SpecCounts",
    "SpecDecRecorder",
    "VLLMSpecDecInstrumentor",
    "__version__",
    "pool",
    "views",
]


def __getattr__(name: str) -> object:
    """The exemplars' SDK side, imported at first use: the package itself needs no SDK."""
    if name in ("GenerationExemplarFilter", "GenerationExemplarReservoir", "views"):
        from otel_specdec import sdk_exemplars

        value: object = getattr(sdk_exemplars, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
