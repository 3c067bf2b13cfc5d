"""Calls and requirements of the suites, with the label of the check in every message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipefit.errors import PipefitError


def call_labelled(label: str, call: Callable[..., Any], *arguments: Any, passes: type[Exception] = PipefitError) -> Any:
    """Return the result of a plug-in's function. An exception becomes an AssertionError with the label, unless it is of
    the type `passes`: that is the plug-in's own message."""
    try:
        return call(*arguments)
    except passes:
        raise
    except Exception as error:
        raise AssertionError(f"{label} raises {type(error).__name__}: {error}") from error


def require(condition: bool, requirement: str) -> None:
    """Raise AssertionError with the requirement unless it holds."""
    if not condition:
        raise AssertionError(requirement)
