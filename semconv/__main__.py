"""Writes the registry's tables into the pages that ask for them: python -m semconv [--check]."""

from __future__ import annotations

import sys

from semconv.tables import ROOT, pages


def main() -> int:
    """Write what differs, or with `--check` only say so."""
    check = "--check" in sys.argv[1:]
    stale = [(path, text) for path, text in pages().items() if path.read_text("utf-8") != text]
    for path, text in stale:
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text, "utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
