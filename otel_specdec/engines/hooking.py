"""Hooks on an engine's methods, as plain functions: wrapt's objects cost more than all that a small step counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

_HOOK: Final = "_otel_specdec_hook"

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])


def hooked(wrapper: Wrapper, original: Callable[..., Any]) -> Wrapper:
    """Make `wrapper` look like the original, which is its `__wrapped__`, and known as ours."""
    functools.update_wrapper(wrapper, original)
    # Itself, not a mark alone: `functools.wraps` copies all attributes to the function of whoever wraps ours.
    setattr(wrapper, _HOOK, wrapper)
    return wrapper


def is_hook(found: Any) -> bool:
    """Whether this is ours, and not the original or somebody's wrapper of either."""
    return found is not None and getattr(found, _HOOK, None) is found


def has_hook(found: Any) -> bool:
    """Whether ours is there, at the top or beneath somebody else's."""
    while found is not None:
        if is_hook(found):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
