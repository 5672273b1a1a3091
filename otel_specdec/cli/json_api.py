"""Requests to HTTP APIs that answer with JSON: a Prometheus, an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ApiError(RuntimeError):
    """There is no answer that can be read; the message says why."""


def ask(url: str, seconds: float, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
    """The answer to a GET, or with data to a POST. No proxy stands between two processes of one machine."""
    try:
        request = urllib.request.Request(url, data, dict(headers or {}))
        opened = _DIRECT.open if urlsplit(url).hostname in _LOOPBACK else urllib.request.urlopen
        with opened(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            why = error.read(500).decode(errors="replace").strip()
        raise ApiError(f"{url} answers with HTTP {error.code}: {why}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    except ValueError as error:
        raise ApiError(f"{url} cannot be read: {error}") from None
