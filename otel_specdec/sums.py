"""Sums waiting for the next collection, one pool for each MeterProvider.

Why: `Counter.add` costs 9 to 25 µs in today's SDK, so an engine's step must not call it. Hooks and recorders add to
    plain sums; the callback of one observable instrument (`names.DRAIN`) moves them into the counters. The SDK runs
    callbacks before it reads the synchronous instruments of the same collection, so every `force_flush`, shutdown and
    in-memory collection is exact, and no thread is needed.

Where it runs: `add` on the caller's thread; a drain on the thread of whoever collects, under the SDK's collection lock:
it never flushes and never creates an instrument.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from opentelemetry import metrics
from opentelemetry.context import Context

from otel_specdec import names
from otel_specdec.counts import LARGEST
from otel_specdec.engines import Picked
from otel_specdec.exemplars import NO_GENERATION, context_of
from otel_specdec.instruments import Instruments
from otel_specdec.provider import install_exemplars, is_auto_instrumented

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

logger = logging.getLogger("otel_specdec")

MAX_ATTRIBUTE_SETS: Final = 2_000
"""Attribute sets of one counter, the overflow set included (the SDK's own limit, which older SDKs do not have)."""

AttributeValue = str | int | bool


class Series(NamedTuple):
    """One counter under one set of point attributes, hashable."""

    metric: names.Metric
    attributes: tuple[tuple[str, AttributeValue], ...]

    @classmethod
    def of(cls, metric: names.Metric, attributes: Mapping[str, AttributeValue | None]) -> Series:
        """The series of `metric` under `attributes`; those that are None are left out."""
        return cls(metric, tuple(sorted((k, v) for k, v in attributes.items() if v is not None)))


class Pick(NamedTuple):
    """A finished generation for exemplars, and its share in the sums that it comes with."""

    generation: Picked
    share: Sequence[tuple[Series, int]]


class Harvest(NamedTuple):
    """What a source has had since it was last asked."""

    sums: Iterable[tuple[Series, int]]
    picks: Sequence[Pick] = ()


class Source(Protocol):
    """Something that keeps sums of its own, in the cheapest form it can, until they are asked for."""

    def take(self) -> Harvest:
        """What came since the last call (values ≥ 0). One call at a time, on the collecting thread."""

    @property
    def ended(self) -> bool:
        """Whether nothing will ever come again, so that the pool may forget it once it is empty."""


class Pool:
    """The pending sums of one MeterProvider. Thread-safe. Use `pool_for`, which makes one for each provider."""

    def __init__(self, provider: MeterProvider) -> None:
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._beginning = threading.Lock()
        self._pending: dict[Series, int] = {}
        self._born: dict[names.Metric, set[Series]] = {metric: set() for metric in names.Metric}
        self._totals: dict[Series, int] = {}  # what was moved into the counters
        self._sources: list[Source] = []
        self._provider = weakref.ref(provider)
        self._on_proxies = _is_proxy(provider)  # until the application sets its provider
        self._suffix = "" if _instance_id(provider) else f"-{_random_suffix()}"
        self.recorder_process = f"recorder-{_random_suffix()}"
        self._process = self.recorder_process  # until an engine says otherwise: for our own errors
        self._logged: set[str] = set()
        self._last_ms = 0
        self._muted = False
        self._counters = Instruments(provider, self._drain).counters

    def process(self, role: str) -> str:
        """The value of `names.PROCESS` for an engine's `role` (`engine-0`, `tokenizer-2`) in this process.

        Processes of one pod share the `service.instance.id` that Kubernetes gives them, so the role keeps their series
        apart; where the resource has no instance id, a random suffix follows.
        """
        self._adopt_provider()
        self._process = role + self._suffix
        return self._process

    def birth(self, all_series: Iterable[Series]) -> None:
        """Begin these series at 0 now, ahead of what they will count; not inside a collection."""
        for series in all_series:
            self.begin(series)

    def begin(self, series: Series) -> Series:
        """The series itself, or its counter's overflow series where that is full; it has begun at 0 on return."""
        self._adopt_provider()
        return self._begin(series)

    def add(self, increments: Iterable[tuple[Series, int]]) -> None:
        """Add to the pending sums, all of `increments` before the next drain. Values are ≥ 0; 0 begins a series."""
        self._adopt_provider()
        increments = [(self._begin(series), value) for series, value in increments]
        with self._lock:
            for series, value in increments:
                self._pending[series] = self._pending.get(series, 0) + value

    def attach(self, source: Source) -> None:
        """Ask `source` for its sums at every drain from now on."""
        with self._lock:
            self._sources.append(source)

    def error(self, error: BaseException, doing: str, source: str = names.ENGINE) -> None:
        """Count a failure of ours under `names.Metric.ERRORS` and log its kind once. Never raises."""
        try:
            kind = type(error).__qualname__
            attributes = {names.ERROR_TYPE: kind, names.SOURCE: source, names.PROCESS: self._process}
            series = Series.of(names.Metric.ERRORS, attributes)
            series = self._begin(series)
            with self._lock:
                self._pending[series] = self._pending.get(series, 0) + 1
                first = (where := f"{kind} while {doing}") not in self._logged and len(self._logged) < 100
                if first:
                    self._logged.add(where)
            if first:
                logger.warning(
                    "otel_specdec failed while %s; the engine is not affected, %s counts it. Shown once.",
                    doing,
                    names.Metric.ERRORS.value,
                    exc_info=error,
                )
        except Exception:  # whatever it was, it must not reach an engine
            logger.debug("otel_specdec could not count an error", exc_info=True)

    def _begin(self, series: Series) -> Series:
        born = self._born[series.metric]
        if series in born:
            return series
        with self._beginning:  # so that nobody counts into a series before its 0
            if series not in born and len(born) >= MAX_ATTRIBUTE_SETS - 1:
                series = Series(series.metric, ((names.OVERFLOW, True),))
            if series in born:
                return series
            born.add(series)
            try:
                self._emit(series, 0)
                return series
            except Exception as error:
                failed = error
        if series.metric is not names.Metric.ERRORS:
            self.error(failed, "beginning a series")
        return series

    def _number_of_series(self) -> int:
        return sum(map(len, self._born.values()))

    def _adopt_provider(self) -> None:
        """Begin anew what began on the API's proxies: only with a provider behind them there is somebody to see it."""
        if self._on_proxies and (provider := _behind(self._provider())) is not None:
            self._on_proxies = False
            if _instance_id(provider):
                self._suffix = ""
            for all_series in self._born.values():
                for series in list(all_series):
                    self._emit(series, 0)

    def _emit(self, series: Series, value: int, context: Context = NO_GENERATION) -> None:
        if self._muted:
            return
        if value:
            total = self._totals.get(series, 0) + value
            if total > LARGEST:
                # OTLP has no such sum: the exporter would refuse every export from here on.
                raise OverflowError(f"{series.metric.value} would exceed 2**63 - 1")
            self._totals[series] = total
        self._counters[series.metric].add(value, dict(series.attributes), context=context)

    def _drain(self, _options: CallbackOptions) -> Iterable[Observation]:
        with self._draining:
            if self._muted:
                return ()
            self._adopt_provider()
            early = _early_pool
            if early is not None and early is not self and early.shares_counters_with(self):
                early._drain(_options)  # the SDK has ignored its callback
            born = self._number_of_series()
            with self._lock:
                pending, self._pending = self._pending, {}
                sources = list(self._sources)
            picks: list[Pick] = []
            for source in sources:
                ended = False
                try:
                    ended = source.ended  # before take(): what comes in between is taken
                    sums, picked = source.take()
                    for series, value in sums:
                        series = self._begin(series)
                        pending[series] = pending.get(series, 0) + value
                    picks.extend(picked)
                except Exception as error:
                    self.error(error, "reading the sums of a source")
                if ended:
                    with self._lock:
                        self._sources.remove(source)
            for pick in sorted(picks, key=lambda pick: pick.generation.finished_unix_nano):
                try:
                    self._emit_pick(pick, pending)
                except Exception as error:
                    self.error(error, "making an exemplar")
            for series, value in pending.items():
                if value:
                    try:
                        self._emit(series, value)
                    except Exception as error:
                        self.error(error, "moving sums into the counters")
            if self._number_of_series() > born:
                _await_next_millisecond()
        return ()

    def _emit_pick(self, pick: Pick, pending: dict[Series, int]) -> None:
        # Prometheus drops an exemplar whose time is not above that of the series' last one, and counts milliseconds.
        self._last_ms = max(pick.generation.finished_unix_nano // 1_000_000, self._last_ms + 1)
        context = context_of(pick.generation, self._last_ms * 1_000_000)
        for series, value in pick.share:
            series = self._begin(series)
            rest = pending.get(series, 0)
            value = min(value, rest)  # a counter never goes down, whatever a source says
            pending[series] = rest - value
            self._emit(series, value, context)

    def shares_counters_with(self, other: Pool) -> bool:
        """Whether this pool's proxies have got `other`'s counters: then only one of the two callbacks is called."""
        counter = getattr(self._counters[names.Metric.ERRORS], "_real_instrument", None)
        return counter is not None and counter is other._counters[names.Metric.ERRORS]

    def after_fork_in_child(self) -> None:
        """Forget what the parent did: it exports that itself, under its own resource."""
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._beginning = threading.Lock()
        self._pending = {}
        self._sources = []
        self._born = {metric: set() for metric in names.Metric}
        self._totals = {}
        self.recorder_process = self._process = f"recorder-{_random_suffix()}"
        if self._suffix:
            self._suffix = f"-{_random_suffix()}"
        self._muted = not all(map(_forget_streams, self._counters.values()))
        if self._muted:
            logger.warning(
                "otel_specdec cannot clear the counts that this process inherited by fork from an instrumented one "
                "(unknown OpenTelemetry SDK): it counts nothing here, lest they are exported twice."
            )


def _await_next_millisecond() -> None:
    """For a series that begins inside a collection (ratios that nobody expected), so that it is older than its point.

    The SDK takes a point's time after the callbacks. With start and time in one millisecond Prometheus takes the start
    for no start at all, and the first increment is lost there whatever its flags.
    """
    millisecond = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == millisecond:
        time.sleep(0.0002)


def _random_suffix() -> str:
    return os.urandom(4).hex()  # `secrets` would import OpenSSL in every process


def _instance_id(provider: MeterProvider) -> object:
    """The resource's `service.instance.id`, where the provider is the SDK's and has one (it has no public getter)."""
    config = getattr(provider, "_sdk_config", None)
    attributes = getattr(getattr(config, "resource", None), "attributes", None) or {}
    return attributes.get("service.instance.id")


def _forget_streams(counter: Any) -> bool:
    """Clear what the SDK has aggregated for `counter`; False where this SDK's inside is not as known (1.30 to 1.45).

    The SDK keeps no public way: a forked child goes on from the parent's sums and exports them under a resource of its
    own (1,000 counted twice, measured).
    """
    counter = getattr(counter, "_real_instrument", counter)  # the API's proxy
    if counter is None or not type(counter).__module__.startswith("opentelemetry.sdk."):
        return True  # no SDK behind it: nothing was aggregated
    consumer = getattr(counter, "_measurement_consumer", None)
    storages = getattr(consumer, "_reader_storages", None)
    if not isinstance(storages, Mapping):
        return False
    if consumer is not None and hasattr(consumer, "_lock"):  # another thread of the parent may have been collecting
        consumer._lock = threading.Lock()
    for reader, storage in storages.items():
        if hasattr(reader, "_export_lock"):  # or exporting, and nobody here would ever give the lock back
            reader._export_lock = threading.Lock()
        streams = getattr(storage, "_instrument_view_instrument_matches", None)
        if not isinstance(streams, dict):
            return False
        streams.pop(counter, None)
        if hasattr(storage, "_lock"):
            storage._lock = threading.RLock()
    return True


_pools: weakref.WeakKeyDictionary[MeterProvider, Pool] = weakref.WeakKeyDictionary()
_pools_lock = threading.Lock()


def pool_for(provider: MeterProvider | None = None) -> Pool:
    """The one pool of `provider` (default: the global one), shared by all recorders and instrumentors.

    One each, because the SDK hands back the first observable of a name and ignores a second callback without a word.
    """
    given: Any = provider if provider is not None else metrics.get_meter_provider()
    given = _behind(given) or given
    with _pools_lock:
        pool = _pools.get(given)
        if pool is None:
            # A pool made before the application set its provider has proxies, which that provider has taken over.
            early = _early_pool if given is metrics.get_meter_provider() else None
            if early is None and is_auto_instrumented() and given is metrics.get_meter_provider():
                install_exemplars(given)  # opentelemetry-instrument takes no views; an application gives its own
            pool = early if early is not None else Pool(given)
            _pools[given] = pool
            if _is_proxy(given):
                _remember_early(pool)
        return pool


_early_pool: Pool | None = None


def _remember_early(pool: Pool) -> None:
    global _early_pool
    _early_pool = pool


def _behind(provider: Any) -> Any:
    """The provider that stands behind the API's proxy by now; None where there is none yet, or no proxy."""
    return getattr(provider, "_real_meter_provider", None)


def _is_proxy(provider: MeterProvider) -> bool:
    return type(provider).__name__ == "_ProxyMeterProvider"


def has_provider() -> bool:
    """Whether the process has a global MeterProvider that was really set."""
    return not _is_proxy(metrics.get_meter_provider())


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in list(_pools.values()):
        pool.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
