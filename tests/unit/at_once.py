"""Many threads at the same time, made to get in each other's way."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None], threads: int = 32) -> None:
    """Calls `work` with each number at the same time; what it raises is raised here."""
    start = threading.Barrier(threads)

    def at_once(number: int) -> None:
        start.wait(timeout=60)
        work(number)

    with switching_often(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(at_once, range(threads), timeout=60))


class Yielding(str):
    """A string that lets other threads run whenever it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(1e-5)
        return super().__hash__()
