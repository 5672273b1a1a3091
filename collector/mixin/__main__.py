"""Writes the committed files: python -m collector.mixin [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from collector.mixin import alerts, recording

COLLECTOR = Path(__file__).resolve().parent.parent


def files() -> dict[Path, str]:
    """What is made, by path."""
    from collector.mixin import dashboards

    rules = COLLECTOR / "prometheus" / "rules"
    return {
        rules / "specdec.rules.yml": recording.stock_file(),
        rules / "specdec_collector.rules.yml": recording.collector_file(),
        rules / "specdec_exact.rules.yml": recording.exact_file(),
        rules / "specdec.alerts.yml": alerts.alert_file(),
        **{COLLECTOR / "dashboards" / name: text for name, text in dashboards.files().items()},
    }


def main() -> int:
    """Write what differs, or with `--check` only say so."""
    stale = [(path, text) for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(path.relative_to(COLLECTOR.parent))
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
