"""OpenTelemetry instrumentation for speculative decoding: raw counters, exemplars that name the generation.

The engines' response paths are wrapped by `VLLMSpecDecInstrumentor`, which `opentelemetry-instrument` finds by itself;
whoever reads counters from responses hands them to a `SpecDecRecorder`. Ratios are computed downstream, from summed
counters; `pool` does so for an in-memory collection. The README has every metric, attribute and environment variable.
"""

from otel_specdec.counts import GenerationReport, SpecCounts
from otel_specdec.instrumentors import VLLMSpecDecInstrumentor
from otel_specdec.pooling import Pooled, pool
from otel_specdec.recorder import SpecDecRecorder
from otel_specdec.version import __version__

__all__ = [
    "GenerationReport",
    "Pooled",
    "SpecCounts",
    "SpecDecRecorder",
    "VLLMSpecDecInstrumentor",
    "__version__",
    "pool",
]
