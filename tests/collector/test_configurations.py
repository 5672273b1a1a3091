"""Every configuration in collector/ loads, and what it says of itself is so."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.collector.processes import BUILD, COLLECTOR, ROOT, run

CONFIGURATIONS = {
    "pipeline": ["pipeline.yaml"],
    "pipeline on a network": ["pipeline.yaml", "network.yaml"],
    "scale-out agent": ["scale-out/agent.yaml"],
    "scale-out pool": ["scale-out/pool.yaml"],
}


def loaded() -> set[Path]:
    return {COLLECTOR / name for files in CONFIGURATIONS.values() for name in files}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_collector_validates(name: str, tmp_path: Path) -> None:
    files = [part for each in CONFIGURATIONS[name] for part in ("--config", COLLECTOR / each)]
    env = {
        **os.environ, "SPECDEC_QUEUE_DIR": str(tmp_path), "SPECDEC_TLS_CERT": "/c", "SPECDEC_TLS_KEY": "/k",
        "SPECDEC_TOKEN_FILE": "/t", "SPECDEC_POOLS": "[127.0.0.1:4327]",
    }  # fmt: skip
    checked = run([BUILD / "otelcol-specdec", "validate", *files], env=env)
    assert checked.returncode == 0, checked.stderr
    assert checked.stderr == ""


def test_no_configuration_is_forgotten() -> None:
    found = {path for path in COLLECTOR.rglob("*.yaml") if "service:" in path.read_text().splitlines()}
    assert found <= loaded(), found - loaded()


def test_the_builder_and_what_it_builds_are_of_one_release() -> None:
    text = (COLLECTOR / "builder.yaml").read_text()
    manifest = yaml.safe_load(text)
    version = manifest["dist"]["version"]
    modules = [
        each["gomod"].split()[1]
        for kind in ("receivers", "processors", "exporters", "extensions")
        for each in manifest[kind]
    ]
    assert set(modules) == {f"v{version}"}
    assert f"COLLECTOR_VERSION := {version}" in (ROOT / "Makefile").read_text()


def test_the_build_has_only_what_a_configuration_uses() -> None:
    components = yaml.safe_load(run([BUILD / "otelcol-specdec", "components"]).stdout)
    built = {
        (kind, each["name"])
        for kind in ("receivers", "processors", "exporters", "extensions")
        for each in components[kind]
    }
    used = set()
    for path in loaded():
        for kind, members in yaml.safe_load(path.read_text()).items():
            if kind != "service":
                used |= {(kind, str(name).split("/")[0]) for name in members or ()}
    assert built == used


@pytest.mark.parametrize("path", sorted(loaded()), ids=lambda path: path.name)
def test_listeners_are_on_loopback_unless_told_otherwise(path: Path) -> None:
    for setting, default in re.findall(r"\$\{env:(SPECDEC_(?:OTLP_\w+|HEALTH)):-([^}]*)\}", path.read_text()):
        assert default.startswith("127.0.0.1:"), setting
    assert "0.0.0.0" not in path.read_text()


def test_compose_and_kubernetes_read_their_manifests() -> None:
    deploy = COLLECTOR / "deploy"
    checked = run([BUILD / "deploy-check", deploy / "compose.yaml", deploy / "kubernetes.yaml"])
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("\n") == 6, checked.stdout


def test_what_compose_mounts_is_there_and_prometheus_reads_it(tmp_path: Path) -> None:
    deploy = COLLECTOR / "deploy"
    services = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (deploy / volume.split(":")[0]).exists(), volume
    # As mounted: the file beside the folder of rules.
    shutil.copytree(COLLECTOR / "prometheus" / "rules", tmp_path / "rules")
    shutil.copy(deploy / "prometheus.compose.yml", tmp_path)
    checked = run([BUILD / "promtool", "check", "config", tmp_path / "prometheus.compose.yml"])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ours = yaml.safe_load((COLLECTOR / "prometheus" / "prometheus.yml").read_text())
    theirs = yaml.safe_load((deploy / "prometheus.compose.yml").read_text())
    assert {key: theirs[key] for key in ("otlp", "storage")} == {key: ours[key] for key in ("otlp", "storage")}


def test_kubernetes_runs_the_files_of_scale_out_with_their_settings() -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in yaml.safe_load_all((COLLECTOR / "deploy" / "kubernetes.yaml").read_text())
        if "template" in each.get("spec", {})
    }
    for tier in ("agent", "pool"):
        container = pods[f"specdec-{tier}"]
        assert container["args"] == [f"--config=/etc/specdec/{tier}.yaml"]
        known = set(re.findall(r"env:(SPECDEC_\w+)", (COLLECTOR / "scale-out" / f"{tier}.yaml").read_text()))
        assert {each["name"] for each in container["env"]} - {"POD_IP"} <= known
