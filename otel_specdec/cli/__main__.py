"""`python -m otel_specdec.cli`, where the console script `otel-specdec` is not on the path."""

from __future__ import annotations

import sys

from otel_specdec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
