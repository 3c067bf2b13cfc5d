"""Constraints that contradict each other: the ones concerned, and the nearest values that go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pipefit.errors import PlanError
from pipefit.plan.request.constraints import Constraints

VALUES_TRIED = 64
"""Nearest values tried for each constraint."""

COUNTS = ("replicas", "context", "expert", "shards", "stages", "microbatches", "state_group")
"""Constraints with a count that the message replaces by the nearest value."""


def explain_contradiction(
    error: PlanError, constraints: Constraints, largest: int, check: Callable[[Constraints], None]
) -> PlanError:
    """Return an error about contradicting constraints: the ones concerned, and the nearest values that go together.

    A constraint is concerned if changing it alone satisfies `check`, which raises PlanError for constraints that leave
    no plan. `largest` is the largest count tried. The error is returned unchanged if no change of one constraint helps.
    """
    changes = [change for key in COUNTS if (change := _nearest_value(key, constraints, largest, check)) is not None]
    if not changes:
        return error
    fixes = [f"{key}={_count_of(value)}" for key in COUNTS if (value := getattr(constraints, key))]
    nearest = ("the nearest that go together: " if len(fixes) > 1 else "the nearest possible: ") + ", or ".join(
        " ".join(
            f"{name}={count if name == key else _count_of(value)}"
            for name in COUNTS
            if (value := getattr(constraints, name))
        )
        for key, count in changes
    )
    return type(error)(
        error.what,
        where=error.where,
        seen=f"{error.seen} (fixed: {', '.join(fixes)})",
        allowed=error.allowed,
        next_step=nearest,
    )


def _nearest_value(
    key: str, constraints: Constraints, largest: int, check: Callable[[Constraints], None]
) -> tuple[str, int] | None:
    """Return (key, count) for the count next to the fixed one that satisfies `check`; None if there is none."""
    value = getattr(constraints, key)
    if not value:
        return None
    for count in _counts_by_distance(_count_of(value), largest):
        try:
            check(replace(constraints, **{key: _value_of(key, count)}, **_sharding_for(key, count, constraints)))
        except PlanError:
            continue
        return key, count
    return None


def _counts_by_distance(near: int, largest: int) -> Iterator[int]:
    """Yield the other counts up to `largest`, the nearest first and the smaller of two equally near ones first."""
    counts = sorted((count for count in range(1, largest + 1) if count != near), key=lambda count: abs(count - near))
    yield from counts[:VALUES_TRIED]


def _count_of(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else len(value)


def _value_of(key: str, count: int) -> Any:
    return (1,) * count if key in ("replicas", "shards") else count


def _sharding_for(key: str, count: int, constraints: Constraints) -> dict[str, Any]:
    """Return no sharding for a single shard, so that only the count decides."""
    return {"sharding": None} if key == "shards" and count == 1 and constraints.sharding is not None else {}
