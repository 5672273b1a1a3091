"""Breaks the code once for each trap that it has to know, and sees whether a test notices.

    python -m tests.mutations [--jobs 2] [NAME ...]    # mutations whose name contains one of these; all without

Each mutation is made in a copy of the working tree, in which the one module of tests runs that should catch it. Needs
the environments `dev` and `sglang`; some 20 minutes on two cores. It is not a test: it tells what the tests are worth.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations import sglang, vllm
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / "build" / "venvs"
MUTATIONS = (*sglang.MUTATIONS, *vllm.MUTATIONS)
LIMIT_S = 300  # some mutations make a test wait for ever
LEFT_OUT = shutil.ignore_patterns("build", "dist", ".git", ".*_cache", ".hypothesis", "__pycache__")


def outcome(mutation: Mutation) -> str:
    """What the tests said of the mutated code: `caught`, `SURVIVED`, or why nothing can be said."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        (copy / "build").symlink_to(ROOT / "build")
        source = copy / mutation.source
        text = source.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            return f"NOT MADE: {mutation.source} has its text {text.count(mutation.old)} times"
        source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        python = VENVS / ("sglang" if "/sglang/" in mutation.tests else "dev") / "bin" / "python"
        command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.tests]
        try:
            ended = subprocess.run(
                command, cwd=copy, env={**env, "PYTHONPATH": str(copy)}, timeout=LIMIT_S,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"caught: {mutation.tests} does not end"
    failed = [line.split(" - ")[0] for line in ended.stdout.splitlines() if line.startswith("FAILED ")]
    if ended.returncode == 1 and failed:
        return f"caught: {failed[0].removeprefix('FAILED ')}"
    if ended.returncode == 0:
        return f"SURVIVED {mutation.tests}"
    return f"NOT RUN: pytest's exit status is {ended.returncode}\n{ended.stdout[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    chosen = [each for each in MUTATIONS if not asked.names or any(name in each.name for name in asked.names)]
    bad = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutation, said in zip(chosen, pool.map(outcome, chosen), strict=True):
            bad += not said.startswith("caught")
            print(f"{mutation.name}: {said}", flush=True)
    print(f"{len(chosen)} mutations, {bad} not caught")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
