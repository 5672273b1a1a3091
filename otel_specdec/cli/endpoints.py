"""Whether metrics would get through to where the OTLP exporters send them.

It is tried with one real, empty export (an `ExportMetricsServiceRequest` without content is zero bytes long, and leaves
nothing behind). gRPC needs no grpcio for this: a server that speaks HTTP/2 answers a connection's first bytes with its
settings. Endpoint, headers and certificates are read from the same variables as the exporters do; headers are sent and
never shown.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

GRPC: Final = "otlp_proto_grpc"
HTTP: Final = "otlp_proto_http"
"""The exporters' entry points."""

_METRICS_PATH: Final = "v1/metrics"
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client says first in HTTP/2 (RFC 9113, 3.4): the preface, and a SETTINGS frame without settings."""
_SETTINGS: Final = 4


@dataclass(frozen=True)
class Answer:
    """What came of it: whether metrics would get through (None: nobody could look), and why."""

    reachable: bool | None
    says: str
    do: str = ""


def endpoint_of(exporter: str, environ: Mapping[str, str] = os.environ) -> str:
    """Where this OTLP exporter sends metrics to, by the variable of metrics, of all signals, or by default."""
    own = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "").strip()
    every = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if exporter == GRPC:
        return own or every or "http://localhost:4317"
    return own or f"{(every or 'http://localhost:4318').rstrip('/')}/{_METRICS_PATH}"


def shown(url: str) -> str:
    """The URL without what may be secret in it: user, password, query."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    text = f"{parts.scheme}://" if parts.scheme else ""
    return text + parts.netloc.rpartition("@")[2] + parts.path


def ask(exporter: str, seconds: float, environ: Mapping[str, str] = os.environ) -> Answer:
    """Send an empty export there (HTTP), or the first bytes of a connection (gRPC). Never raises."""
    endpoint = endpoint_of(exporter, environ)
    try:
        urlsplit(endpoint)
    except ValueError as error:
        return Answer(False, f"The endpoint is no URL ({error}).", "Correct OTEL_EXPORTER_OTLP_ENDPOINT.")
    try:
        return (_ask_grpc if exporter == GRPC else _ask_http)(endpoint, seconds, environ)
    except ssl.SSLError as error:
        return Answer(
            False,
            f"TLS with {shown(endpoint)} fails: {error.reason or error}.",
            "Check OTEL_EXPORTER_OTLP_CERTIFICATE, and whether that port speaks TLS: `http://` in the endpoint is "
            "without.",
        )
    except (OSError, ValueError) as error:
        return _no_connection(endpoint, error)


def _no_connection(endpoint: str, error: Exception) -> Answer:
    why = str(getattr(error, "strerror", None) or error) or type(error).__name__
    return Answer(
        False,
        f"Nothing answers at {shown(endpoint)} ({why}): no export gets through.",
        "Start the receiver (a collector, Prometheus with --web.enable-otlp-receiver, or `otel-specdec watch`), or "
        "correct OTEL_EXPORTER_OTLP_ENDPOINT. Run the doctor where the server runs: localhost is another one in each "
        "container.",
    )


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    text = environ.get("OTEL_EXPORTER_OTLP_METRICS_HEADERS") or environ.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
    pairs = (each.partition("=") for each in text.split(",") if "=" in each)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    def file(kind: str) -> str | None:
        return environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{kind}") or environ.get(f"OTEL_EXPORTER_OTLP_{kind}")

    context = ssl.create_default_context(cafile=file("CERTIFICATE"))
    if client := file("CLIENT_CERTIFICATE"):
        context.load_cert_chain(client, file("CLIENT_KEY"))
    return context


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        """The exporters' posts would come out as something else at the other end: the redirect is the answer."""


def _ask_http(endpoint: str, seconds: float, environ: Mapping[str, str]) -> Answer:
    where = shown(endpoint)
    if urlsplit(endpoint).scheme not in ("http", "https"):
        return Answer(
            False, f"The endpoint {where} is no http:// or https:// URL.", "Correct OTEL_EXPORTER_OTLP_ENDPOINT."
        )
    headers = {**_headers(environ), "Content-Type": "application/x-protobuf"}
    request = urllib.request.Request(endpoint, data=b"", headers=headers, method="POST")
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if endpoint.startswith("https"):
        handlers.append(urllib.request.HTTPSHandler(context=_tls(environ)))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as answer:
            status = int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        status = error.code
    except urllib.error.URLError as error:
        if isinstance(error.reason, Exception):
            raise error.reason from None
        raise
    except http.client.HTTPException:
        return Answer(
            False,
            f"What listens at {where} does not speak HTTP/1.1: is it an OTLP/gRPC port?",
            "OTLP/HTTP is usually port 4318; for a gRPC port set OTEL_EXPORTER_OTLP_PROTOCOL=grpc.",
        )
    return _of_status(status, where)


def _of_status(status: int, where: str) -> Answer:
    if status < 300:
        return Answer(True, f"{where} took an empty export (HTTP {status}).")
    if status in (401, 403, 407):
        return Answer(
            False,
            f"{where} refuses us (HTTP {status}): it wants credentials.",
            "Set OTEL_EXPORTER_OTLP_HEADERS as its vendor says.",
        )
    if status in (404, 405, 501) or status < 400:
        return Answer(
            False,
            f"Something answers at {where}, but not to OTLP metrics (HTTP {status}).",
            "OTEL_EXPORTER_OTLP_ENDPOINT is a base to which v1/metrics is added, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT "
            "the whole URL; Prometheus takes OTLP at /api/v1/otlp/v1/metrics, with --web.enable-otlp-receiver.",
        )
    if status < 500:
        return Answer(True, f"{where} answers (HTTP {status} to an empty export).")
    return Answer(False, f"{where} answers with HTTP {status}.", "Look into the receiver's own log.")


def _ask_grpc(endpoint: str, seconds: float, environ: Mapping[str, str]) -> Answer:
    parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    where = shown(endpoint)
    if not parts.hostname:
        return Answer(
            None, f"The doctor cannot look at {where}: it knows host and port only.", "Look whether metrics arrive."
        )
    proxy = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if environ.get(name)), None)
    if proxy and not urllib.request.proxy_bypass(parts.hostname):
        return Answer(
            None,
            f"gRPC goes to {where} through the proxy of {proxy}: the doctor has not looked.",
            f"If it should not: unset {proxy}, or add the host to no_proxy.",
        )
    secure = _grpc_is_secure(parts.scheme, environ)
    with socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), seconds) as connection:
        if secure:
            context = _tls(environ)
            context.set_alpn_protocols(["h2"])
            connection = context.wrap_socket(connection, server_hostname=parts.hostname)
        connection.sendall(_HTTP2)
        head = _read(connection, 9)
    if len(head) == 9 and head[3] == _SETTINGS:
        return Answer(True, f"{where} speaks HTTP/2, as OTLP/gRPC does{'' if secure else ' (without TLS)'}.")
    return Answer(
        False,
        f"What listens at {where} does not speak HTTP/2{'' if secure else ' without TLS'}: is it an OTLP/HTTP port?",
        "OTLP/gRPC is usually port 4317; for an HTTP port set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf.",
    )


def _grpc_is_secure(scheme: str, environ: Mapping[str, str]) -> bool:
    if scheme == "https":
        return True
    insecure = environ.get("OTEL_EXPORTER_OTLP_METRICS_INSECURE") or environ.get("OTEL_EXPORTER_OTLP_INSECURE")
    return insecure.lower() != "true" if insecure else scheme != "http"


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other end closes or says no more within the connection's timeout."""
    read = b""
    try:
        while len(read) < size and (part := connection.recv(size - len(read))):
            read += part
    except (TimeoutError, ConnectionError):
        pass
    return read
