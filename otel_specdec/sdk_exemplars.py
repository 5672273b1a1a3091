"""The SDK's side of the exemplars: a reservoir, a filter, a view, and their installation where nobody else can do it.

Imports the SDK, so it is imported only where there is one. For an application that makes its own MeterProvider:

    MeterProvider(readers, views=views(), exemplar_filter=GenerationExemplarFilter())

Private SDK names that `install` touches, guarded (1.30 to 1.45 have them; tests check it for each SDK they run on):
`MeterProvider._sdk_config` with `.views` and `.exemplar_filter`, which the SDK reads anew for every measurement.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.metrics import Exemplar, ExemplarFilter, ExemplarReservoir, TraceBasedExemplarFilter
from opentelemetry.sdk.metrics.view import View
from opentelemetry.util.types import Attributes

from otel_specdec import names
from otel_specdec.candidates import PICKS
from otel_specdec.exemplars import ExemplarLabels, labels_in

logger = logging.getLogger("otel_specdec")

PRIVATE_NAMES: Final = ("_sdk_config", "_sdk_config.views", "_sdk_config.exemplar_filter")
"""What `install` touches on a MeterProvider, beyond the SDK's public names."""


_Item = tuple[float, int, "int | float", ExemplarLabels]  # what it is kept by, negative; a tie-breaker


class GenerationExemplarReservoir(ExemplarReservoir):
    """Keeps at most 4 generations between two collections: those with the lowest random numbers, so uniformly.

    One of the places goes to the generation with the lowest accept rate, where one is marked as that.

    It takes nothing that is not one generation's, so no measurement made inside somebody's span leaves a trace id,
    and it holds nothing after a collection: no stale trace id either (the SDK's fixed-size one keeps them, seen on
    1.45.2).

    Args:
        size: how many it keeps (≥ 1).
        kwargs: what the SDK's aggregations hand to every reservoir; not used.
    """

    def __init__(self, size: int = PICKS, **kwargs: Any) -> None:
        super().__init__()
        self._size = size
        self._lock = threading.Lock()
        self._tie = itertools.count()
        self._kept: list[_Item] = []  # a heap, highest order first
        self._marked: list[_Item] = []  # those with the lowest accept rates; a heap, highest rate first

    def offer(self, value: float, time_unix_nano: int, attributes: Attributes, context: Context) -> None:
        """Take a measurement if it is one generation's (see `ExemplarReservoir`)."""
        labels = labels_in(context)
        if labels is None:
            return
        marked = labels.lowest_rate is not None
        item = (
            -(labels.lowest_rate if labels.lowest_rate is not None else labels.order),
            next(self._tie),
            value,
            labels,
        )
        with self._lock:
            kept = self._marked if marked else self._kept
            if len(kept) < self._size:
                heapq.heappush(kept, item)
            else:
                heapq.heappushpop(kept, item)

    def collect(self, point_attributes: Attributes) -> list[Exemplar]:
        """The kept generations in the order of their finish; forgets them (see `ExemplarReservoir`)."""
        with self._lock:
            marked, self._marked = sorted(self._marked, reverse=True), []
            kept, self._kept = sorted(self._kept, reverse=True), []
        # Of several marked ones (one for each drain between two collections) those behind the first come last.
        found = [*marked[:1], *kept, *marked[1:]][: self._size]
        return [
            Exemplar(dict(labels.attributes), value, labels.time_unix_nano, labels.span_id, labels.trace_id)
            for _, _, value, labels in sorted(found, key=lambda item: item[3].time_unix_nano)
        ]


class GenerationExemplarFilter(ExemplarFilter):
    """Lets every generation's measurement be offered, sampled trace or not; asks another filter about all others.

    Args:
        base: the filter that it replaces and that decides on measurements that are not ours; default: the SDK's own
            default, `TraceBasedExemplarFilter`.
    """

    def __init__(self, base: ExemplarFilter | None = None) -> None:
        self._base = base or TraceBasedExemplarFilter()

    def should_sample(self, value: float, time_unix_nano: int, attributes: Attributes, context: Context) -> bool:
        """Whether to offer this measurement to a reservoir (see `ExemplarFilter`)."""
        return labels_in(context) is not None or self._base.should_sample(value, time_unix_nano, attributes, context)


def _reservoir_factory(_aggregation: type) -> type[GenerationExemplarReservoir]:
    return GenerationExemplarReservoir


def views() -> Sequence[View]:
    """The views that put `GenerationExemplarReservoir` under our meter's instruments, and touch nothing else.

    Do not use them beside a view of your own that matches our instruments too (`View("*", …)` does): the SDK makes one
    stream for each matching view, both under the same name, and backends add them up. To keep such a view, give it
    `exemplar_reservoir_factory=lambda aggregation: GenerationExemplarReservoir` and leave `views()` out.
    """
    return (View(meter_name=names.METER, exemplar_reservoir_factory=_reservoir_factory),)


def install(provider: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Give a provider that takes no views from its user ours, before its first measurement of ours. Never raises.

    OTEL_METRICS_EXEMPLAR_FILTER is obeyed: `always_off`, no exemplars; `trace_based`, those of sampled traces only;
    `always_on` or unset, those of every generation picked.

    Returns:
        Whether exemplars will carry ids. Where this SDK cannot be given views (one warning says so), the SDK's own
        reservoir still shows the trace of a sampled request.
    """
    try:
        config = provider._sdk_config
        existing, base = config.views, config.exemplar_filter
        if not isinstance(existing, Sequence) or not isinstance(base, ExemplarFilter):
            raise TypeError(f"views are {type(existing).__name__}, the filter is {type(base).__name__}")
        if not any(getattr(view, "_exemplar_reservoir_factory", None) is _reservoir_factory for view in existing):
            config.views = (*views(), *existing)
        chosen = environ.get("OTEL_METRICS_EXEMPLAR_FILTER", "").strip().lower()
        if chosen not in ("always_off", "trace_based") and not isinstance(base, GenerationExemplarFilter):
            config.exemplar_filter = GenerationExemplarFilter(base)
    except Exception as error:
        logger.warning(
            "otel_specdec: exemplars will not name generations, at most their traces: this OpenTelemetry SDK cannot be "
            "given a view (%s: %s).",
            type(error).__name__,
            error,
        )
        return False
    return True
