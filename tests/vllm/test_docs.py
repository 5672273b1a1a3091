"""What the pages tell people to do with vLLM: the program runs on the real engine, the server takes the options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.vllm_demo.tiny_model import Models
from tests.docs.pages import ROOT, commands

SERVERS = [words for _, words in commands() if words[:3] == ["opentelemetry-instrument", "vllm", "serve"]]


def test_the_program_of_the_first_page_prints_ratios(models: Models, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"<!-- skip: next -->\n```python\n(.*?)```", page, re.DOTALL)
    # This machine has no accelerator and little memory; nothing else of the program is changed.
    here = (
        f'"{models.target}", dtype="float32", max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20, '
    )
    assert program.count('"MODEL", ') == 1
    script = tmp_path / "ratio.py"
    script.write_text(program.replace('"MODEL", ', here))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert "'completion': 64" in ended.stdout
    ratios = dict(re.findall(r"^(\w+) +([\d.]+)   \(of 100% of the generations\)$", ended.stdout, re.MULTILINE))
    assert ratios.keys() == {"acceptance_length", "accept_rate", "tokens_per_verify"}
    assert 1 <= float(ratios["acceptance_length"]) <= 5


@pytest.mark.parametrize("words", SERVERS)
def test_the_server_takes_the_options_of_the_pages(words: list[str]) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])
    assert options.model_tag == "MODEL"
    assert options.speculative_config["method"] == "ngram"


def test_there_are_such_servers() -> None:
    assert len(SERVERS) == 3
