"""What the exact rules have recorded, added up over their windows."""

from __future__ import annotations

import time
from collections import Counter as Tally

from collector.mixin.prometheus_names import MODEL, RATIOS, SOURCE
from tests.collector.fleet import Truth
from tests.collector.processes import Prometheus, eventually

NAMES = {
    **{f"numerator.{ratio}": f"specdec:{ratio}:numerator_increase1m" for ratio in RATIOS},
    **{f"denominator.{ratio}": f"specdec:{ratio}:denominator_increase1m" for ratio in RATIOS},
    **{f"covered.{ratio}": f"specdec:{ratio}:covered_increase1m" for ratio in RATIOS},
    "generations": "specdec:generations:increase1m",
}
QUOTIENTS = {
    **{f"specdec:{ratio}:ratio_increase1m": (f"numerator.{ratio}", f"denominator.{ratio}") for ratio in RATIOS},
}


def last_window(prometheus: Prometheus) -> float:
    """The end of the last window that was recorded, 0 where there is none."""
    samples = prometheus.samples(NAMES["generations"], 3600)
    return max((values[-1][0] for _, values in samples), default=0.0)


def wait_for_window_after(prometheus: Prometheus, end: float, seconds: float = 60) -> None:
    """Wait until a window was recorded that ends after `end`."""
    assert eventually(lambda: last_window(prometheus) > end, seconds, 0.2), time.time() - end


def totals(prometheus: Prometheus, seconds: int = 3600) -> Truth:
    """The sums over all windows; every one of them is a whole number of tokens."""
    total: Truth = Tally()
    for name, series in NAMES.items():
        for labels, samples in prometheus.samples(series, seconds):
            for _, value in samples:
                assert value == int(value), (series, labels, value)
                assert value >= 0, (series, labels, value)
                total[labels[MODEL], labels[SOURCE], name] += int(value)
    return total


def check_quotients(prometheus: Prometheus, seconds: int = 3600) -> int:
    """Each ratio is the quotient of its window's sums, and is where its denominator is not 0; how many there are."""
    checked = 0
    halves = {
        name: {
            (labels[MODEL], labels[SOURCE], at): value
            for labels, samples in prometheus.samples(series, seconds)
            for at, value in samples
        }
        for name, series in NAMES.items()
    }
    for series, (above, below) in QUOTIENTS.items():
        found = {
            (labels[MODEL], labels[SOURCE], at): value
            for labels, samples in prometheus.samples(series, seconds)
            for at, value in samples
        }
        assert set(found) == {key for key, value in halves[below].items() if value and key in halves[above]}
        for key, value in found.items():
            assert value == halves[above][key] / halves[below][key]
            checked += 1
    return checked
