"""What Prometheus calls our counters and attributes, and the labels that a pool is made by.

Prometheus translates names that came by OTLP: dots to underscores, `_total` after a counter, units in braces left out
(its `translation_strategy: UnderscoreEscapingWithSuffixes`, the default, which prometheus.yml pins).
"""

from __future__ import annotations

from typing import Final

from otel_specdec import names
from otel_specdec.names import Metric


def label(attribute: str) -> str:
    """The label of an attribute."""
    return attribute.replace(".", "_")


def counter(metric: Metric) -> str:
    """The series name of a counter."""
    return f"{label(metric.value)}_total"


def entering(metric: Metric, ratio: str) -> str:
    """The series of a counter that may enter a ratio: generations of which both halves are known and consistent."""
    return f'{counter(metric)}{{{label(names.RATIO_SET)}=~"(.+,)?{ratio}(,.+)?"}}'


PROVIDER: Final = label(names.PROVIDER)
MODEL: Final = label(names.MODEL)
METHOD: Final = label(names.METHOD)
SOURCE: Final = label(names.SOURCE)
POSITION: Final = label(names.POSITION)
REASON: Final = label(names.REASON)
ENGINE_INDEX: Final = label(names.ENGINE_INDEX)
PROCESS: Final = label(names.PROCESS)
ERROR_TYPE: Final = label(names.ERROR_TYPE)
ENVIRONMENT: Final = "deployment_environment_name"
VERSION: Final = "service_version"

POOL: Final = ("job", ENVIRONMENT, PROVIDER, MODEL, METHOD, SOURCE)
"""A pool. Always with the source: engine and recorder may have counted the same generation, so nothing sums over it."""

REPLICA: Final = (*POOL, "instance", PROCESS, ENGINE_INDEX)
"""One engine or recorder of a pool. `instance` is the resource's `service.instance.id`."""

RATIOS: Final = tuple(names.RATIOS)
"""The one to look at first comes first."""
