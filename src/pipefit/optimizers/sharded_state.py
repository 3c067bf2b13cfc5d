"""Sharding of the training state over the replicas: the stages of ZeRO (Rajbhandari et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pipefit.errors import PlanError

ShardedState = Literal["none", "optimizer", "gradients", "parameters"]
"""The state that the replicas shard: none, the optimizer's (ZeRO-1), also gradients (ZeRO-2), also parameters
(ZeRO-3)."""

STATES: tuple[ShardedState, ...] = get_args(ShardedState)
"""All values, from the fastest to the one that needs the least memory."""

STATES_UP_TO_ZERO_1: tuple[ShardedState, ...] = ("none", "optimizer")
"""The values of plans with several modules, and those that a search on unlike devices tries by itself."""

SHARDED_FORM = "Gflat"
"""Form of an optimizer state that is sharded flat over the replicas (`pipefit.layout`)."""

_FORMS: Mapping[ShardedState, str] = {
    "none": "I",
    "optimizer": SHARDED_FORM,
    "gradients": f"{SHARDED_FORM}:gradients",
    "parameters": f"{SHARDED_FORM}:parameters",
}
"""Form of a parameter's optimizer state in plan files: what follows the colon is sharded in the same way."""

LEGACY_KEY = "zero1"
"""The key of plan files and `--fix`, true or false, in place of `sharded_state`."""

_LEGACY: Mapping[str, str] = {"none": "false", "optimizer": "true"}


def check_sharded_state(value: str, where: str) -> ShardedState:
    """Return the value. Raises PlanError if it is unknown."""
    for state in STATES:
        if value == state:
            return state
    raise PlanError("This is not a kind of sharded state.", where=where, seen=value, allowed=", ".join(STATES))


def effective_state(state: ShardedState, replicas: int) -> ShardedState:
    """Return the state that this number of replicas (or of all devices that sum gradients) shards: none for one."""
    return state if replicas > 1 else "none"


def searched_states(unlike_devices: bool) -> tuple[ShardedState, ...]:
    """Return the values that a search tries by itself. On unlike devices there are too many candidates for all."""
    return STATES_UP_TO_ZERO_1 if unlike_devices else STATES


def state_choices(
    required: ShardedState | None, replicas: int, searched: tuple[ShardedState, ...] = STATES
) -> tuple[ShardedState, ...]:
    """Return the values that a search tries, the fastest first: the required one, if there is one."""
    if required is not None:
        return (required,)
    return searched if replicas > 1 else ("none",)


def leanest_state(required: ShardedState | None, allowed: tuple[ShardedState, ...] = STATES) -> ShardedState:
    """Return the required value, or the allowed one that needs the least memory."""
    return required if required is not None else allowed[-1]


def shards_optimizer(state: ShardedState) -> bool:
    """Return whether the replicas shard the optimizer state (ZeRO-1, 2 and 3)."""
    return state != "none"


def shards_gradients(state: ShardedState) -> bool:
    """Return whether the replicas keep only shards of the gradients between the microbatches (ZeRO-2 and 3)."""
    return state in ("gradients", "parameters")


def shards_parameters(state: ShardedState) -> bool:
    """Return whether the replicas keep only shards of the parameters between their uses (ZeRO-3)."""
    return state == "parameters"


def parameter_state(state: ShardedState, uses: int) -> ShardedState:
    """Return the state that is sharded of a parameter that this number of layers uses.

    Layers gather and release their parameters one by one, so parameters shared by several layers stay complete, with a
    sharded optimizer state.
    """
    return "optimizer" if uses > 1 and shards_gradients(state) else state


def state_form(state: ShardedState) -> str:
    """Return the form of the optimizer state along the axis of the replicas, as plan files hold it."""
    return _FORMS[state]


def is_gathered_after_update(form: str) -> bool:
    """Return whether a parameter with this form of optimizer state is all-gathered after each update."""
    return form in (_FORMS["optimizer"], _FORMS["gradients"])


def form_layout(form: str) -> str:
    """Return the layout of an optimizer state in this form: the form without what else is sharded like it."""
    return SHARDED_FORM if form in _FORMS.values() and form != "I" else form


def state_of_forms(forms: Iterable[str]) -> ShardedState:
    """Return the most that the parameters with these forms of optimizer state shard."""
    held = set(forms)
    return next((state for state in reversed(STATES) if _FORMS[state] in held), "none")


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
