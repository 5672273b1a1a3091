"""What the pages tell people to do with SGLang is what the other tests of this folder run, or what SGLang takes."""

from __future__ import annotations

import argparse

import pytest
from sglang.srt.server_args import ServerArgs

from tests.docs.pages import commands
from tests.sglang.serving import CPU, SETTINGS, arguments

COMMANDS = [words for _, words in commands()]
SERVERS = [words[4:] for words in COMMANDS if words[1:4] == ["python", "-m", "sglang.launch_server"]]


@pytest.mark.parametrize("options", SERVERS)
def test_the_server_takes_the_options_of_the_pages(options: list[str]) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    taken = parser.parse_args([option for option in options if option != "..."])
    assert taken.model_path == "MODEL"


def test_there_is_such_a_server() -> None:
    assert SERVERS


def of(module: str) -> list[str]:
    (words,) = (words for words in COMMANDS if words[1:3] == ["-m", module])
    return words[3:]


def test_the_examples_are_started_as_the_tests_start_them() -> None:
    ours = {"speculative_algorithm", "speculative_num_draft_tokens"}
    shown = of("examples.sglang")
    assert shown[1] == "--"
    wanted = arguments(**dict.fromkeys(ours))
    assert as_options(shown[2:]) == as_options(wanted)
    offline = dict(word.split("=") for word in of("examples.sglang.offline")[1:])
    assert offline == {
        name: "true" if value is True else str(value) for name, value in SETTINGS.items() if name not in ours
    }
    (export,) = (
        words for words in COMMANDS if words[:2] == ["export", f"SGLANG_USE_CPU_ENGINE={CPU['SGLANG_USE_CPU_ENGINE']}"]
    )
    assert export[2].endswith("tests/sglang/cpu_kernels")


def as_options(words: list[str]) -> set[tuple[str, str]]:
    """Options with their values, in no order."""
    values = [*words[1:], "--"]
    return {
        (word, "" if value.startswith("--") else value)
        for word, value in zip(words, values, strict=True)
        if word.startswith("--")
    }
