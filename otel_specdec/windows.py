"""What a recorder remembers: the latest so many generations, each a digest of its identity and its packed state.

Free of OpenTelemetry and of locks. An entry takes some 200 bytes whatever its ids are like, and about a microsecond
(and one more for each 1,000 characters of the ids). `hashlib` loads OpenSSL, so this module is imported when a recorder
is made, and not with the package.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice
from typing import Final

from otel_specdec.batches import Identity

_DIGEST_BYTES: Final = 15
"""120 bits, and with the 33 bytes of a bytes object's own just 48: the allocator counts in sixteens."""


def digest_of(identity: Identity) -> bytes:
    """What an identity is remembered by.

    Two identities are taken for one another if their digests are equal. Among n remembered ones the chance that a new
    one meets any is n / 2**120: for the 131,072 that a recorder remembers by default 1e-31, so that in a thousand
    million generations the chance of one wrong duplicate or conflict is 1e-22. To make such a pair on purpose takes
    2**60 tries, and spoils the count of that pair alone; to meet the id of somebody else takes 2**120.
    """
    session, generation = identity
    # The length in front, so that no two identities read alike; any string can be an id, lone surrogates too.
    text = f"-{generation}" if session is None else f"{len(session)}-{session}{generation}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


class Window:
    """The states of the `size` generations (> 0) that were put last; up to 1/64 more, and exactly so many below 64.

    A dict keeps the order in which its keys came, but finds its first one only behind all that were deleted before it:
    so the oldest are dropped some at a time.
    """

    __slots__ = ("_size", "_states")

    def __init__(self, size: int) -> None:
        self._size = size
        self._states: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, digest: object) -> bool:
        return digest in self._states

    def get(self, digest: bytes) -> bytes | None:
        """The packed state of this generation, if it is remembered."""
        return self._states.get(digest)

    def put(self, digest: bytes, state: bytes) -> bool:
        """Remember this state as the latest; whether others had to be forgotten for it."""
        self._states.pop(digest, None)
        self._states[digest] = state
        surplus = len(self._states) - self._size
        if surplus <= self._size // 64:
            return False
        for oldest in list(islice(self._states, surplus)):
            del self._states[oldest]
        return True

    def forget(self, digest: bytes) -> None:
        """Forget this generation, if it is remembered."""
        self._states.pop(digest, None)
