"""What `make dist` builds: nothing that does not belong there, nothing missing, the same bytes each time."""

from __future__ import annotations

import configparser
import email
import hashlib
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import tomllib

from otel_specdec import __version__
from tests.release.building import PACKAGE, ROOT, Built, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MODULES = {
    path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.name == "py.typed"
}


@pytest.fixture(scope="module")
def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as wheel:
        return email.message_from_string(wheel.read(f"otel_specdec-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_package_and_its_metadata_and_nothing_else(built: Built) -> None:
    info = f"otel_specdec-{__version__}.dist-info"
    own = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(built.wheel) as wheel:
        assert set(wheel.namelist()) == MODULES | own
        assert "otel_specdec/py.typed" in wheel.namelist()
        assert b"Root-Is-Purelib: true" in wheel.read(f"{info}/WHEEL")


def test_the_sdist_holds_what_the_wheel_is_built_from_and_nothing_else(built: Built) -> None:
    folder = f"otel_specdec-{__version__}"
    # .gitignore: hatchling reads it, in the sdist too.
    own = {"PKG-INFO", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"}
    with tarfile.open(built.sdist) as sdist:
        names = {member.name for member in sdist.getmembers() if member.isfile()}
    assert names == {f"{folder}/{name}" for name in MODULES | own}


def test_two_builds_are_the_same_to_the_byte(built: Built, tmp_path: Path) -> None:
    again = build(tmp_path / "again")
    for one, other in ((built.wheel, again.wheel), (built.sdist, again.sdist)):
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest(), one.name


def test_twine_has_passed_both_without_a_warning(built: Built) -> None:
    assert built.said.count("PASSED") == 2
    assert "warning" not in built.said.lower()


def test_the_metadata_are_those_of_the_project(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("otel-specdec", __version__)
    assert metadata["Requires-Python"].replace(" ", "") == PROJECT["requires-python"].replace(" ", "")
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text("utf-8").strip()
    assert set(metadata.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()


def test_no_requirement_is_a_path_or_an_address(metadata: Message) -> None:
    assert [each for each in metadata.get_all("Requires-Dist", []) if "@" in each or "/" in each] == []


def test_the_entry_points_are_those_of_the_project(built: Built) -> None:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    with zipfile.ZipFile(built.wheel) as wheel:
        parser.read_string(wheel.read(f"otel_specdec-{__version__}.dist-info/entry_points.txt").decode())
    found = {group: dict(parser[group]) for group in parser.sections()}
    scripts = {"console_scripts": PROJECT["scripts"]} if "scripts" in PROJECT else {}
    assert found == {**PROJECT["entry-points"], **scripts}


def test_the_changelog_has_the_version_and_what_is_not_yet_released_above_it() -> None:
    heads = [line for line in (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines() if line.startswith("## ")]
    assert heads[0] == "## [Unreleased]"
    assert heads[1].startswith(f"## [{__version__}] - ")
