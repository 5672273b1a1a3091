"""The queries of the committed dashboards, as Grafana asks them."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.collector.processes import COLLECTOR


def panel_targets() -> list[tuple[str, dict[str, Any]]]:
    """Every target of every panel, with the panel's title."""
    return [
        (panel["title"], target)
        for path in sorted((COLLECTOR / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def for_everything(expression: str) -> str:
    """A panel's query with "All" for every variable."""
    return re.sub(r"\$\{?\w+\}?", ".*", expression)
