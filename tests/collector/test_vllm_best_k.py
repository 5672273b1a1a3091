"""One run at k = 5 tells what a smaller k would have given: held against a real run at that k.

`python -m tests.benchmarks.best_k` does it for every k and for a draft model too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.best_k import measure


def test_the_prediction_for_k_two_is_near_what_a_run_at_two_gives(tmp_path: Path) -> None:
    (outcome,) = measure(tmp_path, ["ngram"], [2])
    print(outcome, f"{outcome.error:+.1%}")
    assert outcome.k == 2
    assert outcome.predicted == pytest.approx(outcome.measured, rel=0.1)
