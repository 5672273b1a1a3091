"""What the doctor says of each setup: its words, and the exit status for scripts."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from otel_specdec import sdk_exemplars
from otel_specdec.cli.doctor import examine
from otel_specdec.cli.findings import Finding, State
from otel_specdec.cli.main import main
from otel_specdec.cli.server_command import ServerCommand
from otel_specdec.cli.setup import Setup
from tests.unit import vllm_stand_in
from tests.unit.fake_distributions import install, install_only
from tests.unit.scripts import environment

OK, NOTE, WARNING, PROBLEM = State.OK, State.NOTE, State.WARNING, State.PROBLEM
NEW, OLD = "0.63b0", "0.62b1"


class Said(NamedTuple):
    """One run of the command."""

    status: int
    text: str


def doctor(
    *arguments: str, env: Mapping[str, str] | None = None, path: Path | None = None, alone: Path | None = None
) -> Said:
    """Run it in a process of its own; `path` comes first on the import path, `alone` is all of it."""
    variables = environment(**(env or {}))
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(path), variables["PYTHONPATH"]])
    if alone is not None:
        variables["PYTHONPATH"] = str(alone)
    command = [sys.executable, *(["-S"] if alone else []), "-m", "otel_specdec.cli", "doctor", *arguments]
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60, check=False, cwd=alone or path
    )
    assert ended.stderr == ""
    return Said(ended.returncode, ended.stdout)


def plain(text: str) -> str:
    """As one line, so that a sentence is found wherever it was broken."""
    return " ".join(text.split())


@contextmanager
def receiver(status: int = 200, location: str = "") -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    """An HTTP server on loopback, and the posts that it got."""
    posts: list[tuple[str, dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            posts.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(status)
            if location:
                self.send_header("location", location)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", posts
    finally:
        server.shutdown()
        server.server_close()


def closed_port() -> str:
    with receiver() as (url, _):
        return url


HTTP = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "tests"}


# The seven setups. vLLM and SGLang themselves: tests/vllm/test_cli.py and tests/sglang/test_doctor.py.


def test_where_nothing_is_installed_there_is_no_engine_and_no_sdk(tmp_path: Path) -> None:
    install_only(tmp_path)
    said = doctor(alone=tmp_path)
    assert said.status == 1
    text = plain(said.text)
    assert "warning No engine to instrument: neither vLLM nor SGLang is installed for this Python." in text
    assert "PROBLEM There is no OpenTelemetry SDK: everything works, and emits nothing." in text
    assert "→ pip install 'otel-specdec[sdk]' opentelemetry-distro opentelemetry-exporter-otlp" in text
    assert "PROBLEM No variable asks for metrics" in text


def test_an_sdk_without_exporter(tmp_path: Path) -> None:
    install_only(tmp_path, "opentelemetry-sdk", "opentelemetry-distro")
    said = doctor(alone=tmp_path, env={"OTEL_METRICS_EXPORTER": "otlp"})
    assert said.status == 1
    text = plain(said.text)
    assert re.search(r"ok OpenTelemetry SDK \d", text)
    assert "PROBLEM The metrics exporter otlp_proto_http is not installed: nothing is exported to it." in text
    assert "→ pip install opentelemetry-exporter-otlp" in text
    assert "`opentelemetry-instrument` asks for otlp_proto_grpc, which is not installed, and sets nothing up" in text


def test_an_endpoint_where_nothing_listens() -> None:
    url = closed_port()
    said = doctor(env={**HTTP, "OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert said.status == 1
    assert f"PROBLEM Nothing answers at {url}/v1/metrics (Connection refused)" in plain(said.text)
    assert "or correct OTEL_EXPORTER_OTLP_ENDPOINT" in plain(said.text)


def test_an_old_auto_instrumentation_does_not_reach_children(tmp_path: Path) -> None:
    install(tmp_path, "opentelemetry-instrumentation", OLD)
    with receiver() as (url, _):
        said = doctor(env={**HTTP, "OTEL_EXPORTER_OTLP_ENDPOINT": url}, path=tmp_path)
    assert said.status == 0  # the engines' plugins get in
    text = plain(said.text)
    assert f"warning opentelemetry-instrumentation {OLD} does not reach child processes" in text
    assert "→ pip install --upgrade opentelemetry-instrumentation opentelemetry-distro opentelemetry-sdk" in text


def test_with_the_exemplar_filter_off_no_generation_is_named() -> None:
    with receiver() as (url, _):
        env = {**HTTP, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRICS_EXEMPLAR_FILTER": "always_off"}
        said = doctor(env=env)
        without = doctor(env={**HTTP, "OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert said.status == 0
    text = plain(said.text)
    assert "warning OTEL_METRICS_EXEMPLAR_FILTER=always_off: no exemplars, so no generation ids." in text
    assert "→ Unset OTEL_METRICS_EXEMPLAR_FILTER" in text
    assert "ok Exemplars name generations" in plain(without.text)


def test_a_vllm_under_its_server(tmp_path: Path) -> None:
    install(tmp_path, "vllm", "0.32.0")
    install(tmp_path, "opentelemetry-instrumentation", NEW)
    vllm_stand_in.write(tmp_path)
    server = ["opentelemetry-instrument", "vllm", "serve", "m", "--speculative-config", "{}"]
    with receiver() as (url, _):
        said = doctor("--", *server, env={**HTTP, "OTEL_EXPORTER_OTLP_ENDPOINT": url}, path=tmp_path)
    text = plain(said.text)
    assert said.status == 0
    assert "ok vLLM: vllm 0.32.0. Every hook is there, by its source." in text
    assert "ok The command line asks for speculative decoding." in text
    assert f"ok opentelemetry-instrumentation {NEW} reaches the processes that the server starts" in text
    assert f"ok {url}/v1/metrics took an empty export (HTTP 200)." in text
    assert "unless it is started with --otlp-traces-endpoint" in text
    assert "0 warnings" not in text
    assert "no problems" in text


@pytest.mark.parametrize(
    ("number", "instrument", "state"), [(NEW, True, OK), (OLD, True, PROBLEM), (NEW, False, PROBLEM)]
)
def test_an_sglang_with_two_tokenizers_needs_auto_instrumentation_that_reaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, instrument: bool, state: State
) -> None:
    install(tmp_path, "sglang", "0.5.23")
    install(tmp_path, "opentelemetry-instrumentation", number)
    monkeypatch.syspath_prepend(tmp_path)
    server = ["python", "-m", "sglang.launch_server", "--tokenizer-worker-num", "2"]
    found = check("children", command=[*(["opentelemetry-instrument"] if instrument else []), *server])
    assert found.state is state
    if not instrument:
        assert "2 tokenizer workers, and SGLang loads no plugins there: nothing is counted" in found.says


# One check at a time, in this process


def findings(command: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> list[Finding]:
    read = ServerCommand.read(command) if command else None
    return examine(Setup(read, 0.5, environ if environ is not None else {"OTEL_METRICS_EXPORTER": "none"}))


def check(name: str, command: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Finding:
    (found,) = [each for each in findings(command, environ) if each.check == name]
    return found


def checks(command: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> set[str]:
    return {each.check for each in findings(command, environ)}


@pytest.mark.parametrize(
    ("environ", "name", "says"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, "sdk_disabled", "OTEL_SDK_DISABLED=true switches everything off"),
        ({"OTEL_METRICS_EXPORTER": "none"}, "asked_for", "OTEL_METRICS_EXPORTER=none: no metrics are exported"),
        (
            {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "specdec_vllm"},
            "disabled.vllm",
            "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS names specdec_vllm or *: vLLM is not hooked",
        ),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*"}, "disabled.sglang", "SGLang is not hooked"),
        ({"SGLANG_RUST_SERVER": "1"}, "sglang.rust_server", "SGLANG_RUST_SERVER is on"),
    ],
)
def test_opt_outs_and_modes_of_the_environment_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], name: str, says: str
) -> None:
    install(tmp_path, "vllm")
    install(tmp_path, "sglang")
    monkeypatch.syspath_prepend(tmp_path)
    found = check(name, environ={"OTEL_METRICS_EXPORTER": "none", **environ})
    assert found.state is PROBLEM
    assert says in found.says
    assert found.do


@pytest.mark.parametrize(("value", "warned"), [("1", True), ("0", False), (None, False)])
def test_vllm_s_rust_front_end_trims_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, warned: bool
) -> None:
    install(tmp_path, "vllm")
    monkeypatch.syspath_prepend(tmp_path)
    environ = {"OTEL_METRICS_EXPORTER": "none"} | ({} if value is None else {"VLLM_USE_RUST_FRONTEND": value})
    found = [each for each in findings(environ=environ) if each.check == "vllm.rust_front_end"]
    assert [each.state for each in found] == ([WARNING] if warned else [])


@pytest.mark.parametrize(
    ("option", "name", "state"),
    [
        ("--smg-grpc-mode", "sglang.grpc_mode", PROBLEM),
        ("--grpc-mode", "sglang.grpc_mode", PROBLEM),
        ("--disaggregation-mode=prefill", "sglang.prefill", NOTE),
    ],
)
def test_modes_of_the_command_line_in_which_sglang_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str, state: State
) -> None:
    install(tmp_path, "sglang")
    monkeypatch.syspath_prepend(tmp_path)
    server = ["python", "-m", "sglang.launch_server", "--model-path", "m"]
    assert check(name, command=[*server, option]).state is state
    assert name not in checks(command=server)
    assert check("sglang.modes").state is NOTE  # without a command line it says which there are


def test_an_engine_whose_hooks_are_not_as_known_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm", "9.0")
    vllm_stand_in.write(tmp_path)
    scheduler = next(tmp_path.rglob("scheduler.py"))
    scheduler.write_text(scheduler.read_text().replace("def update_from_output(", "def update_from_outputs("))
    monkeypatch.syspath_prepend(tmp_path)
    found = check("engine.vllm")
    assert found.state is PROBLEM
    assert "Scheduler.update_from_output is not a method" in found.says
    assert "Upgrade otel-specdec" in found.do


def test_a_front_end_that_is_not_as_known_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm", "9.0")
    vllm_stand_in.write(tmp_path)
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True, exist_ok=True)
    (tmp_path / "vllm" / "v1" / "engine" / "output_processor.py").write_text("class OutputProcessor: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert check("engine.vllm").state is OK
    found = check("engine.vllm.front_end")
    assert found.state is WARNING
    assert "has no OutputProcessor.process_outputs" in found.says


def test_where_an_engine_s_source_is_not_there_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm", "0.32.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = check("engine.vllm")
    assert found.state is WARNING
    assert "vllm 0.32.0. The doctor could not look for the hooks: its source is not here" in found.says


def test_no_engine_is_ever_imported(tmp_path: Path) -> None:
    """Importing this one would end the process."""
    for engine in ("vllm", "sglang"):
        (tmp_path / engine).mkdir()
        (tmp_path / engine / "__init__.py").write_text("import os; os._exit(9)")
    said = doctor("--json", path=tmp_path, env={"OTEL_METRICS_EXPORTER": "none"})
    assert said.status == 1
    assert {each["check"] for each in json.loads(said.text)["findings"]} >= {"engine.vllm", "engine.sglang"}


def test_a_list_of_plugins_without_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm")
    vllm_stand_in.write(tmp_path)
    (tmp_path / "vllm" / "plugins.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    none = {"OTEL_METRICS_EXPORTER": "none"}
    for value in ("other", ""):
        found = check("plugin.vllm", environ={**none, "VLLM_PLUGINS": value})
        assert found.state is WARNING
        assert found.do == "Add specdec_vllm to VLLM_PLUGINS."
    assert "plugin.vllm" not in checks(environ={**none, "VLLM_PLUGINS": "other,specdec_vllm"})
    assert "plugin.vllm" not in checks(environ=none)


def test_the_prometheus_exporter_takes_one_port_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pulled.py").write_text("class Reader: ...\n")
    install(tmp_path, "pulled", entry_points="[opentelemetry_metrics_exporter]\nprometheus = pulled:Reader\n")
    monkeypatch.syspath_prepend(tmp_path)
    environ = {"OTEL_METRICS_EXPORTER": "prometheus"}
    assert check("prometheus_port", environ=environ).state is WARNING
    found = check("prometheus_port", command=["opentelemetry-instrument", "vllm", "serve"], environ=environ)
    assert found.state is PROBLEM
    assert "finds it taken" in found.says


def test_an_exporter_that_cannot_be_loaded_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken", entry_points="[opentelemetry_metrics_exporter]\nbroken = not_there:Exporter\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = check("exporter.broken", environ={"OTEL_METRICS_EXPORTER": "broken"})
    assert found.state is PROBLEM
    assert "cannot be loaded (ModuleNotFoundError" in found.says


def test_an_unknown_protocol_stops_auto_instrumentation() -> None:
    found = check("protocol", environ={"OTEL_METRICS_EXPORTER": "console", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    assert found.state is PROBLEM


@pytest.mark.parametrize("preference", ["delta", "lowmemory", "DELTA"])
def test_deltas_are_not_for_prometheus(preference: str) -> None:
    found = check("temporality", environ={"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": preference})
    assert found.state is WARNING
    assert "Prometheus refuses them" in found.says


def test_two_servers_in_one_pod_need_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = "service.name=tests,service.instance.id=pod-1"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes)
    found = check("instance_id", environ={"OTEL_METRICS_EXPORTER": "none", "OTEL_RESOURCE_ATTRIBUTES": attributes})
    assert found.state is NOTE
    assert "service.instance.id is pod-1" in found.says
    assert "two servers with this id" in found.says
    assert "service.instance.id=$POD-$PORT" in found.do


def test_it_says_what_it_can_know_of_views() -> None:
    assert check("views").state is NOTE
    found = check("views", environ={"OTEL_METRICS_EXPORTER": "none", "OTEL_CONFIG_FILE": "otel.yaml"})
    assert found.state is WARNING
    assert "OTEL_CONFIG_FILE is set" in found.says


def test_an_sdk_that_cannot_be_given_a_view_names_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_exemplars, "views", lambda: 1 / 0)
    found = check("exemplars")
    assert found.state is WARNING
    assert "this OpenTelemetry SDK cannot be given a view" in found.says


def test_every_finding_that_is_not_fine_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm")
    install(tmp_path, "sglang")
    monkeypatch.syspath_prepend(tmp_path)
    url = closed_port()
    for environ in (
        {"OTEL_SDK_DISABLED": "true", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*", "SGLANG_RUST_SERVER": "1"},
        {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": url, "VLLM_PLUGINS": "x"},
        {"OTEL_METRICS_EXEMPLAR_FILTER": "trace_based", "OTEL_METRICS_EXPORTER": "nothing-like-it"},
    ):
        found = findings(environ=environ)
        assert [each.check for each in found if each.state is not OK and not each.do] == []
        assert [each.check for each in found if each.state is OK and each.do] == []


# Text, JSON, colours, exit status


def test_json_has_the_status_and_every_finding(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == 1
    assert {"topic", "check", "state", "says", "do"} == set(found["findings"][0])
    assert {each["state"] for each in found["findings"]} <= {"ok", "note", "warning", "problem"}


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_only_on_a_terminal_and_not_with_no_color(variables: dict[str, str], coloured: bool) -> None:
    env = environment(OTEL_METRICS_EXPORTER="none", TERM="xterm") | variables
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "otel_specdec.cli", "doctor"]
    process = subprocess.Popen(command, env=env, stdout=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65_536):
            shown += part
    except OSError:  # what Linux says when the other end has closed
        pass
    os.close(ours)
    assert process.wait(30) == 1
    assert b"PROBLEM" in shown
    assert (b"\033[" in shown) is coloured
    assert "\033[" not in doctor(env={"OTEL_METRICS_EXPORTER": "none"}).text  # no terminal


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["doctor", "--no-such-option"],
        ["doctor", "--prometheus", "http://127.0.0.1:1"],
        ["doctor", "--timeout", "soon"],
        ["watch", "--", "vllm", "serve"],
        ["doctor", "--prove", "http://127.0.0.1:1", "--", "vllm", "serve"],
        ["watch", "--port", "70000"],
    ],
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_watch_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    install_only(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "otel_specdec.cli", "watch", "--once"],
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "pip install 'otel-specdec[cli]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_importing_the_package_imports_nothing_of_the_command() -> None:
    script = "import otel_specdec, sys; print([n for n in sys.modules if n.startswith(('otel_specdec.cli', 'rich'))])"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"
