"""Sharding of the training state over the replicas: the stages of ZeRO (Rajbhandari et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pipefit.errors import PlanError

ShardedState = Literal["none", "optimizer", "gradients", "parameters"]
"""The state that the replicas shard: none, the optimizer's (ZeRO-1), also gradients (ZeRO-2), also parameters
(ZeRO-3)."""

IMPLEMENTED: tuple[ShardedState, ...] = ("none", "optimizer")
"""The values that plans may have, from the fastest to the one that needs the least memory."""

SHARDED_FORM = "Gflat"
"""Form of an optimizer state that is sharded flat over the replicas (`pipefit.layout`)."""

LEGACY_KEY = "zero1"
"""The key of plan files and `--fix`, true or false, in place of `sharded_state`."""

_LEGACY: Mapping[str, str] = {"none": "false", "optimizer": "true"}


def check_sharded_state(value: str, where: str) -> ShardedState:
    """Return the value. Raises PlanError if it is unknown or not implemented."""
    for known in IMPLEMENTED:
        if value == known:
            return known
    known_value = value in get_args(ShardedState)
    raise PlanError(
        f"Replicas cannot shard {value} yet." if known_value else "This is not a kind of sharded state.",
        where=where,
        seen=value,
        allowed=", ".join(IMPLEMENTED),
        next_step="use optimizer (ZeRO-1), or shard the layers with shards=2" if known_value else None,
    )


def effective_state(state: ShardedState, replicas: int) -> ShardedState:
    """Return the state that this number of replicas shards: none for one replica."""
    return state if replicas > 1 else "none"


def state_choices(required: ShardedState | None, replicas: int) -> tuple[ShardedState, ...]:
    """Return the values that a search tries, the fastest first: the required one, if there is one."""
    if required is not None:
        return (required,)
    return IMPLEMENTED if replicas > 1 else ("none",)


def leanest_state(required: ShardedState | None) -> ShardedState:
    """Return the value that needs the least memory, or the required one."""
    return required if required is not None else IMPLEMENTED[-1]


def state_form(state: ShardedState) -> str:
    """Return the form of the optimizer state along the axis of the replicas, as plan files hold it."""
    return SHARDED_FORM if state != "none" else "I"


def state_of_forms(forms: Iterable[str]) -> ShardedState:
    """Return the value that these forms of an optimizer state stand for."""
    return "optimizer" if SHARDED_FORM in forms else "none"


def encode_decisions(decisions: Mapping[str, str]) -> dict[str, str]:
    """Return decisions as plan files hold them: with `zero1`, so that plans keep their hashes."""
    if decisions.get("sharded_state") not in _LEGACY:
        return dict(decisions)
    return dict(
        (LEGACY_KEY, _LEGACY[value]) if key == "sharded_state" else (key, value) for key, value in decisions.items()
    )


def decode_decisions(decisions: Mapping[str, str]) -> dict[str, str]:
    """Return the decisions of a plan file, with `sharded_state` in place of `zero1`."""
    states = {text: state for state, text in _LEGACY.items()}
    return dict(
        ("sharded_state", states.get(value, value)) if key == LEGACY_KEY else (key, value)
        for key, value in decisions.items()
    )
