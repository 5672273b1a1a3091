"""What docs/cli.md says of the command is so."""

from __future__ import annotations

import re
import shlex

import pytest

from otel_specdec.cli.findings import FINE, PROBLEM, USAGE
from otel_specdec.cli.main import parse
from tests.unit.scripts import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("otel-specdec")])
def test_every_command_on_the_page_is_one(line: str) -> None:
    _, *arguments = shlex.split(line)
    assert parse(arguments).command == arguments[0]


def test_the_page_shows_both_commands_and_what_to_install() -> None:
    text = "\n".join(COMMANDS)
    for command in ("pip install 'otel-specdec[cli]'", "otel-specdec doctor", "otel-specdec watch", "--prove"):
        assert command in text


def test_the_exit_statuses_are_those_of_the_page() -> None:
    assert re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE) == [str(status) for status in (FINE, PROBLEM, USAGE)]
