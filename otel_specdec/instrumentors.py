"""The instrumentors, and the entry points by which auto-instrumentation and the engines' own plugins find them.

Loaded at start-up of every process under `opentelemetry-instrument`: it imports no engine and no SDK, and makes nothing
until an engine with speculation is there. Installing the package changes nothing by itself.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_specdec import names
from otel_specdec.counts import COUNT_FIELDS, METRIC_OF_FIELD, ratios_holding
from otel_specdec.engines import EngineDescription, Increment, Picked, Tally
from otel_specdec.engines import sglang as sglang_adapter
from otel_specdec.engines import vllm as vllm_adapter
from otel_specdec.package import SGLANG_DISTRIBUTIONS, VLLM_DISTRIBUTIONS
from otel_specdec.provider import (
    Flusher,
    instrumentation_disabled,
    is_auto_instrumented,
    metrics_asked_for,
    provider_from_environment,
    sdk_disabled,
)
from otel_specdec.sums import AttributeValue, Harvest, Pick, Series, has_provider, pool_for

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

logger = logging.getLogger("otel_specdec")


_POSITIONS = (names.Metric.POSITION_ACCEPTED, names.Metric.POSITION_PROPOSED)


class EngineSource:
    """An engine's tally as series of counters: a `pool.Source`."""

    def __init__(self, engine: EngineDescription, tally: Tally, process: str) -> None:
        self._tally = tally
        self._attributes: dict[str, AttributeValue | None] = {
            names.PROVIDER: engine.provider,
            names.MODEL: engine.model,
            names.METHOD: engine.method,
            names.SOURCE: names.ENGINE,
            names.ENGINE_INDEX: engine.index,
            names.PROCESS: process,
        }
        self._ratios = engine.ratios
        self._known = (
            [names.Metric.TRIMMED]
            if engine.front_end
            else [
                *(metric for field, metric in METRIC_OF_FIELD.items() if field not in engine.unknown),
                names.Metric.GENERATIONS,
            ]
        )
        self._max_drafts = 0 if engine.front_end else min(engine.max_drafts, names.MAX_POSITIONS)
        self._counters: dict[tuple[names.Metric, frozenset[str]], Series] = {}
        self._positions: dict[tuple[names.Metric, int], Series] = {}

    @property
    def ended(self) -> bool:
        """See `sums.Source`."""
        return self._tally.ended

    def expected(self) -> list[Series]:
        """Every series that this engine's configuration can produce: the full ratio sets, and positions 0 to k − 1."""
        return [self._counter(metric, self._ratios) for metric in self._known] + [
            self._position(metric, position) for metric in _POSITIONS for position in range(self._max_drafts)
        ]

    def take(self) -> Harvest:
        """See `sums.Source`."""
        taken = self._tally.take()
        sums = [each for increment in taken.increments for each in self._series_of(increment)]
        return Harvest(sums, [Pick(picked, self._share(picked)) for picked in taken.picked])

    def _series_of(self, increment: Increment) -> Iterator[tuple[Series, int]]:
        """The series that an increment adds to; known zeros too, which begin a series."""
        ratios = increment.ratios if increment.ratios is not None else ratios_holding(increment.counts)
        for field in COUNT_FIELDS:
            value = getattr(increment.counts, field)
            if value is not None:
                yield self._counter(METRIC_OF_FIELD[field], ratios), value
        if increment.generations:
            yield self._counter(names.Metric.GENERATIONS, ratios), increment.generations
        if increment.trimmed is not None:
            yield self._counter(names.Metric.TRIMMED, ratios), increment.trimmed
        by_position = (increment.accepted_by_position, increment.proposed_by_position)
        for metric, values in zip(_POSITIONS, by_position, strict=True):
            for position, value in enumerate(values):
                if value:
                    yield self._position(metric, position), value

    def _share(self, picked: Picked) -> list[tuple[Series, int]]:
        """What one generation has in the sums: an exemplar goes to each of the counters, not to positions."""
        share: dict[Series, int] = {}
        for increment in picked.increments:
            for series, value in self._series_of(increment):
                if series.metric not in _POSITIONS:
                    share[series] = share.get(series, 0) + value
        return list(share.items())

    def _counter(self, metric: names.Metric, holding: frozenset[str]) -> Series:
        series = self._counters.get((metric, holding))
        if series is None:
            ratio_set = None if metric is names.Metric.TRIMMED else names.ratio_set(metric, holding)
            series = Series.of(metric, {**self._attributes, names.RATIO_SET: ratio_set})
            self._counters[metric, holding] = series
        return series

    def _position(self, metric: names.Metric, position: int) -> Series:
        series = self._positions.get((metric, position))
        if series is None:
            series = Series.of(metric, {**self._attributes, names.POSITION: position})
            self._positions[metric, position] = series
        return series


class EngineCounters:
    """Takes what an adapter tells into the pool of the right MeterProvider: an `engines.EngineListener`.

    The provider is chosen when an engine comes up, not before: the one given to `instrument()`, else the global one
    that the process has by then, else one of our own where the environment asks for metrics.
    """

    def __init__(self, provider: MeterProvider | None, log: logging.Logger) -> None:
        self._given = provider
        self._log = log
        self._flusher: Flusher | None = None

    def engine_started(self, engine: EngineDescription, tally: Tally, is_idle: Callable[[], bool]) -> None:
        """Begin the engine's series at 0 and watch its sums. Never raises."""
        try:
            provider, whose, ours = self._provider()
            pool = pool_for(provider)
            role = engine.role or f"engine-{engine.index}"
            source = EngineSource(engine, tally, pool.process(role))
            pool.birth(source.expected())
            pool.attach(source)
            self._flusher = flusher_for(provider, when_idle=ours)
            self._flusher.watch(is_idle)
            if engine.front_end:
                self._log.debug("otel_specdec counts trimmed tokens of %s %s into %s", engine.provider, role, whose)
                return
            self._log.info(
                "otel_specdec counts speculative decoding of %s engine %d (model %s, method %s, k = %s) into %s",
                engine.provider,
                engine.index,
                engine.model,
                engine.method,
                engine.max_drafts or "unknown",
                whose,
            )
        except Exception as error:
            self.failed(error, "starting to count an engine")

    def engine_idle(self) -> None:
        """Have the provider flushed soon, if it is one that we may flush."""
        if self._flusher is not None:
            self._flusher.idle()

    def failed(self, error: Exception, doing: str) -> None:
        """Count and log once what went wrong. Never raises."""
        try:
            pool_for(self._given).error(error, doing)
        except Exception:
            logger.debug("otel_specdec failed while %s", doing, exc_info=True)

    def _provider(self) -> tuple[MeterProvider, str, bool]:
        """The provider, whose it is in words, and whether we may flush it."""
        if self._given is not None and self._given in _private:
            return self._given, "a MeterProvider of its own, made as the environment says", True
        if self._given is not None:
            return self._given, "the MeterProvider given to instrument()", False
        if not has_provider() and metrics_asked_for():
            private = _private_provider()
            if private is not None:
                self._given = private
                return private, "a MeterProvider of its own, made as the environment says", True
        if is_auto_instrumented():
            return metrics.get_meter_provider(), "the MeterProvider of opentelemetry-instrument", True
        whose = "the application's global MeterProvider" if has_provider() else "no MeterProvider yet"
        return metrics.get_meter_provider(), whose, False


_flushers: dict[int, Flusher] = {}
_private: list[MeterProvider | None] = []
_lock = threading.Lock()


def flusher_for(provider: MeterProvider, *, when_idle: bool) -> Flusher:
    """The one flusher of `provider` in this process."""
    with _lock:
        flusher = _flushers.get(id(provider))
        if flusher is None:
            flusher = _flushers[id(provider)] = Flusher(provider, when_idle=when_idle)
        return flusher


def _private_provider() -> MeterProvider | None:
    with _lock:
        if not _private:
            _private.append(provider_from_environment())
        return _private[0]


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _flushers.clear()  # their threads stayed in the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class _EngineInstrumentor(BaseInstrumentor):
    """What the instrumentors of all engines have in common: one engine's hooks, installed for one `EngineCounters`."""

    _module = ""
    _distributions: Iterable[str] = ()
    _adapter: Any = None
    _hooks: Any = None
    _by_plugin = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """Nothing where the engine is there, under whichever distribution name and version; else its first name."""
        return () if _is_installed(self._module, self._distributions) else (self._module,)

    def instrument(self, **kwargs: Any) -> Any:
        """Hook the engine. A call by the application takes over from the engine's plugin, which knows no arguments.

        Args:
            kwargs: `meter_provider`, the MeterProvider to count into (default: the global one; where the process has
                none and the environment asks for metrics, one of our own).
        """
        if self._by_plugin:
            self.uninstrument()
        return super().instrument(**kwargs)

    def _instrument(self, **kwargs: Any) -> None:
        if not _is_installed(self._module, self._distributions):
            logger.info("otel_specdec: %s is not installed here, so there is nothing to instrument.", self._module)
            return
        self._hooks = self._adapter.Hooks(EngineCounters(kwargs.get("meter_provider"), self._adapter.logger))
        self._hooks.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        self._by_plugin = False
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None


class VLLMSpecDecInstrumentor(_EngineInstrumentor):
    """Counts vLLM's speculative decoding in the process that holds the scheduler.

    `VLLMSpecDecInstrumentor().instrument(meter_provider=None)` may come before or after vllm is imported, and after the
    engine was built (it then counts from there on). `uninstrument()` puts vLLM's methods back; what was counted until
    then is in the next collection.
    """

    _module = "vllm"
    _distributions = VLLM_DISTRIBUTIONS
    _adapter = vllm_adapter


class SGLangSpecDecInstrumentor(_EngineInstrumentor):
    """Counts SGLang's speculative decoding in the process that holds the tokenizer manager.

    `SGLangSpecDecInstrumentor().instrument(meter_provider=None)` may come before or after sglang is imported, but
    before the engine or the server is made: to 0.5.10 it captures the methods that are hooked. `uninstrument()` puts
    them back; what was counted until then is in the next collection.
    """

    _module = "sglang"
    _distributions = SGLANG_DISTRIBUTIONS
    _adapter = sglang_adapter


def _is_installed(module: str, distributions: Iterable[str]) -> bool:
    for name in distributions:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    # A source tree on the path; this imports nothing. What is imported may have no spec, which find_spec refuses.
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def vllm_plugin() -> None:
    """Entry point of `vllm.general_plugins`: vLLM calls it in every process of its own. Never raises.

    It instruments only where metrics are wanted: the process has a MeterProvider, or the environment asks for one.
    """
    _start_by_plugin(VLLMSpecDecInstrumentor, "specdec_vllm")


def sglang_plugin() -> None:
    """Entry point of `sglang.srt.plugins` (0.5.14 on), called in every process but tokenizer workers. Never raises.

    It instruments only where metrics are wanted: the process has a MeterProvider, or the environment asks for one.
    """
    _start_by_plugin(SGLangSpecDecInstrumentor, "specdec_sglang")


def _start_by_plugin(kind: type[_EngineInstrumentor], entry_point: str) -> None:
    try:
        instrumentor = kind()
        if instrumentor.is_instrumented_by_opentelemetry or sdk_disabled() or instrumentation_disabled(entry_point):
            return
        if has_provider() or metrics_asked_for():
            instrumentor.instrument(skip_dep_check=True)
            instrumentor._by_plugin = True
    except Exception:
        logger.warning(
            "otel_specdec: the plugin %s could not start; the engine is not affected.", entry_point, exc_info=True
        )
