"""Our counters as a Prometheus has them: raw samples and exemplars by its HTTP API, so that nothing is extrapolated.

Prometheus renames what came by OTLP (dots to underscores, `_total` behind), or not, as it is configured: both are read.
It does not tell start times, so a restart is seen where a value falls.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlencode, urlsplit

from otel_specdec import names
from otel_specdec.cli.json_api import ApiError, ask
from otel_specdec.cli.windows import Named, Observation
from otel_specdec.names import Metric


def label(attribute: str) -> str:
    """What an attribute, or a metric, is called with underscores."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)


_ATTRIBUTES: Final = {
    label(attribute): attribute
    for attribute in (
        names.PROVIDER, names.MODEL, names.METHOD, names.SOURCE, names.ENGINE_INDEX, names.PROCESS, names.RATIO_SET,
        names.POSITION, names.REASON, names.ERROR_TYPE, names.RESPONSE_ID, names.CHOICE,
    )
}  # fmt: skip
_METRICS: Final = {label(metric.value): metric for metric in Metric}
_SELECTOR: Final = '{{__name__=~"{}"}}'.format(
    "|".join(f"{metric.value.replace('.', '[._]')}(_total)?" for metric in Metric)
)


class Prometheus:
    """One server.

    Args:
        url: its base, with user and password where it wants them; ApiError for one that is none. seconds: for each
            request.
    """

    def __init__(self, url: str, seconds: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ApiError(f"{url} is no http:// or https:// URL")
        host = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        self._seconds = seconds
        self._headers = {}
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    def samples(self, seconds: int) -> list[Observation]:
        """Every sample of our counters in the last so many seconds, by series in the order of time."""
        data = self._get("query", query=f"{_SELECTOR}[{seconds}s]")
        observed: list[Observation] = []
        for series in data.get("result", ()):
            if found := _series(series.get("metric", {})):
                metric, identity, attributes = found
                for at, text in series.get("values", ()):
                    value = float(text)
                    if math.isfinite(value):
                        observed.append(Observation(metric, identity, attributes, int(value), 0, int(float(at) * 1e9)))
        return observed

    def exemplars(self, seconds: int, now: float) -> list[Named]:
        """The generations that exemplars of the last so many seconds name; `now` in seconds since the epoch."""
        data = self._get("query_exemplars", query=_SELECTOR, start=f"{now - seconds:.3f}", end=f"{now + 1:.3f}")
        return list(_named(data))

    def _get(self, what: str, **parameters: str) -> Any:
        # A post: a selector of ours is longer than some proxies allow a URL to be.
        url = f"{self.url}/api/v1/{what}"
        answer = ask(url, self._seconds, urlencode(parameters).encode(), self._headers)
        if not isinstance(answer, dict) or "data" not in answer:
            raise ApiError(f"{url} is no Prometheus: its answer has no data")
        return answer["data"]


def _series(labels: Mapping[str, str]) -> tuple[Metric, frozenset[tuple[str, str]], dict[str, object]] | None:
    metric = _METRICS.get(label(labels.get("__name__", "")).removesuffix("_total"))
    if metric is None:
        return None
    # Labels of the resource (job, instance) are part of the identity, and of no group.
    return metric, frozenset(labels.items()), _attributes(labels)


def _attributes(labels: Mapping[str, str]) -> dict[str, object]:
    return {_ATTRIBUTES[label(name)]: value for name, value in labels.items() if label(name) in _ATTRIBUTES}


def _named(data: Any) -> Iterator[Named]:
    for series in data or ():
        found = _series(series.get("seriesLabels", {}))
        if found is None:
            continue
        metric, identity, attributes = found
        for exemplar in series.get("exemplars", ()):
            labels = exemplar.get("labels", {})
            said = _attributes(labels)
            if names.RESPONSE_ID in said:
                yield Named(
                    metric, identity, attributes, str(said[names.RESPONSE_ID]), str(said.get(names.CHOICE, "")),
                    labels.get("trace_id", ""), int(float(exemplar["timestamp"]) * 1000), int(float(exemplar["value"])),
                )  # fmt: skip
