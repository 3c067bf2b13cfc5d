"""The field's names for the keys of `--fix`: `dp`, `tp`, `pp`, `cp`, `ep`, `zero`, `fsdp`, `hsdp`, `sp`, `mbs`.

An alias stands for one or two fields of `Constraints`. It is translated before anything is planned, so a plan and its
messages hold the keys of `--fix` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pipefit.errors import PlanError
from pipefit.optimizers.sharded_state import STATES
from pipefit.plan.request.expert_parts import EXPERT, TENSOR_SHARDING, splits_rows

SWITCHES: Mapping[str, bool] = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

RANK_ORDERS: Mapping[str, str] = {"dp-first": "replica", "pp-first": "stage"}

Fixes = tuple[tuple[str, str], ...]
"""Keys of `--fix` with the text of their values."""


@dataclass(frozen=True, slots=True)
class KeyAlias:
    """Another name for one or two keys of `--fix`. `translate` raises ValueError for a value that it does not take."""

    help: str
    "What it stands for, and its values."
    translate: Callable[[str], Fixes]


def _same_value(key: str) -> Callable[[str], Fixes]:
    return lambda value: ((key, value),)


def _translate_zero(value: str) -> Fixes:
    if value not in ("0", "1", "2", "3"):
        raise ValueError(value)
    return (("sharded_state", STATES[int(value)]),)


def _translate_zero1(value: str) -> Fixes:
    return (("sharded_state", "optimizer" if SWITCHES[value.lower()] else "none"),)


def _translate_fsdp(value: str) -> Fixes:
    """Parse `true` as parameters sharded over any number of replicas, `8` over eight."""
    if value.lower() in ("true", "yes"):
        return (("sharded_state", "parameters"),)
    if int(value) < 2:
        raise ValueError(value)
    return (("replicas", value), ("sharded_state", "parameters"))


def _translate_hsdp(value: str) -> Fixes:
    if int(value) < 2:
        raise ValueError(value)
    return (("state_group", value), ("sharded_state", "parameters"))


def _translate_expert(value: str) -> Fixes:
    if int(value) < 1:
        raise ValueError(value)
    return (("shards", value), ("sharding", EXPERT)) if int(value) > 1 else ()


def _translate_sequence_parallel(value: str) -> Fixes:
    return (("sharding", "megatron-sp" if SWITCHES[value.lower()] else "megatron"),)


ALIASES: Mapping[str, KeyAlias] = {
    "dp": KeyAlias("replicas: data parallelism, a count or shares", _same_value("replicas")),
    "tp": KeyAlias("shards: tensor parallelism, a count or shares", _same_value("shards")),
    "pp": KeyAlias("stages: pipeline parallelism, a count", _same_value("stages")),
    "cp": KeyAlias("context: context parallelism, a count", _same_value("context")),
    "ep": KeyAlias(
        "expert parallelism within dp, a count: shards, with sharding=expert; beside tp=N its part of ep/N is expert",
        _translate_expert,
    ),
    "zero": KeyAlias("sharded_state: 0 none, 1 optimizer, 2 gradients, 3 parameters", _translate_zero),
    "zero1": KeyAlias("sharded_state: true is optimizer, false is none", _translate_zero1),
    "fsdp": KeyAlias("sharded_state=parameters: true, or a count of replicas from 2 on", _translate_fsdp),
    "hsdp": KeyAlias("sharded_state=parameters over groups of this many replicas: state_group", _translate_hsdp),
    "sp": KeyAlias("sharding: true is megatron-sp, false is megatron", _translate_sequence_parallel),
    "rank_order": KeyAlias(
        "inner: dp-first (adjacent ranks are replicas) or pp-first (adjacent ranks are stages)",
        lambda value: (("inner", RANK_ORDERS[value]),),
    ),
    "device_order": KeyAlias("mapping: hostname, search, or device numbers", _same_value("mapping")),
    "microbatches_per_call": KeyAlias("multiple: microbatches of a module's call", _same_value("multiple")),
    "split_by": KeyAlias("divide: samples or images, divided by the replicas of a module", _same_value("divide")),
    "max_units_ahead": KeyAlias("ahead: units that a module may run ahead", _same_value("ahead")),
}
"""Aliases whose meaning does not depend on other choices."""

ROWS = "mbs"
"""The alias for rows of a microbatch on one replica: with `dp` and the batch it fixes `microbatches`."""

ROWS_HELP = "rows of a microbatch on a replica, with dp: a count such that mbs x dp divides the batch"

DATA_ALIASES = ("dp", "fsdp")
"""Aliases whose count of replicas includes the devices of expert parallelism."""

UNAVAILABLE: Mapping[str, str] = {"vp": "A count of virtual stages"}
"""Axes of other systems that plans do not have, by alias; 1 is accepted."""

INSTEAD: Mapping[str, str] = {
    "vp": "use schedule=interleaved-1f1b with stages of all lanes together: stages=8 is two on each of four lanes",
}


@dataclass(frozen=True, slots=True)
class FixedText:
    """The value of a key of `--fix` as text, and the text that the user typed for it."""

    value: str
    typed: str


def translate_key(key: str, value: str, typed: str) -> Fixes:
    """Return the keys of `--fix` that `key=value` stands for: itself, unless `key` is an alias.

    Raises PlanError for a value that the alias does not take, and for an axis that plans do not have.
    """
    if key in UNAVAILABLE:
        if value == "1":
            return ()
        raise PlanError(
            f"{UNAVAILABLE[key]} is not implemented.",
            where="--fix",
            seen=repr(typed),
            allowed=f"{key}=1",
            next_step=INSTEAD[key],
        )
    if key not in ALIASES:
        return ((key, value),)
    try:
        return ALIASES[key].translate(value)
    except (ValueError, KeyError):
        raise PlanError(
            f"This is not a valid value for {key!r}.", where="--fix", seen=repr(typed), allowed=ALIASES[key].help
        ) from None


@dataclass(frozen=True, slots=True)
class TypedFix:
    """One `--fix KEY=VALUE` as the user typed it, apart from the module in front of the key."""

    key: str
    value: str
    text: str


def check_module_fixes(fixes: Sequence[TypedFix]) -> None:
    """Raise PlanError for expert parallelism of one of several modules."""
    for fix in fixes:
        if fix.key == "ep" and fix.value != "1":
            raise PlanError(
                "Expert parallelism is for models of one module.",
                where="--fix",
                seen=fix.text,
                allowed=f"{fix.text.rpartition('=')[0]}=1",
                next_step="leave it out",
            )


def translate_fixes(fixes: Sequence[TypedFix], batch: int | None) -> Iterator[tuple[str, FixedText]]:
    """Yield the keys of `--fix` that the fixes of one module stand for. Raises PlanError as `translate_key` and
    `join_expert_axis` do."""
    fixed: dict[str, FixedText] = {}
    for fix in sorted(join_expert_axis(fixes), key=lambda fix: fix.key == ROWS):  # rows need the replicas
        key, value = fix.key, fix.value
        if key == ROWS:
            parts = _row_parts(fixed)
            devices = parts * _share_count(fixed["replicas"].value) if "replicas" in fixed else None
            key, value = "microbatches", microbatches_of_rows(value, fix.text, devices, batch, f"dp={4 * parts}")
        for known, known_value in translate_key(key, value, fix.text):
            entry = FixedText(known_value, fix.text)
            fixed.setdefault(known, entry)
            yield known, entry


def _row_parts(fixed: Mapping[str, FixedText]) -> int:
    """Return the number of parts of the rows of a replica."""
    divided = "sharding" in fixed and splits_rows(fixed["sharding"].value) and "shards" in fixed
    parts = fixed["shards"].value if divided else fixed["expert"].value if "expert" in fixed else "1"
    return _share_count(parts)


def _share_count(text: str) -> int:
    """Return the number of shares in `4` or `2:1:1`; 1 for a text that is neither."""
    return int(text) if text.isdecimal() else text.count(":") + 1


def join_expert_axis(fixes: Sequence[TypedFix]) -> list[TypedFix]:
    """Return the fixes with `ep` applied to `dp`, `fsdp` and `tp`, as Megatron counts them.

    Expert parallelism lies within data and tensor parallelism, so `dp=16 ep=8` is two replicas of eight devices.
    `tp=8 ep=8` is tensor parallelism that also divides the experts (`sharding=megatron-sp`), and `tp=2 ep=8` is that
    beside an axis of four groups of shards (`expert=4`), which divides `dp`. Raises PlanError if `tp` does not divide
    `ep`, and if the part that `ep` takes of `dp` does not divide it.
    """
    typed = {fix.key: fix for fix in fixes}
    expert, tensor = typed.get("ep"), typed.get("tp")
    if expert is None or not expert.value.isdecimal() or int(expert.value) < 2:
        return [*fixes]
    if tensor is None or tensor.value == "1":
        count, left = int(expert.value), [fix for fix in fixes if fix != tensor]
        return list(chain.from_iterable(_divide_replicas(fix, count, expert.text) for fix in left))
    parts = _expert_parts(tensor, expert)
    fixed = [replace(fix, key="sharding", value=TENSOR_SHARDING) if fix == expert else fix for fix in fixes]
    beside = f"{tensor.text} {expert.text}"
    divided = [part for fix in fixed for part in _divide_replicas(fix, parts, beside)] if parts > 1 else fixed
    return [*divided, replace(expert, key="expert", value=str(parts))]


def _expert_parts(tensor: TypedFix, expert: TypedFix) -> int:
    """Return the number of groups of tensor parallelism among the devices of expert parallelism. Raises PlanError
    unless `tp` is a count that divides `ep`."""
    count, shards = int(expert.value), int(tensor.value) if tensor.value.isdecimal() else 0
    if shards and count % shards == 0:
        return count // shards
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    more = f", or ep={max(1, count // shards) * shards} or another multiple of {shards}" if shards else ""
    raise PlanError(
        "Expert parallelism is over whole groups of tensor parallelism, so tp divides ep.",
        where="--fix",
        seen=f"{tensor.text} and {expert.text}",
        allowed=f"tp of {', '.join(map(str, sizes))}{more}",
        next_step=f"leave out {tensor.text}",
    )


def _divide_replicas(fix: TypedFix, count: int, beside: str) -> list[TypedFix]:
    """Return a count of `dp` or `fsdp` as the number of replicas that take `count` of it each; other fixes as they
    are. `beside`: the texts of the fixes for which they take them."""
    if fix.key not in DATA_ALIASES or fix.value.lower() in ("true", "yes"):
        return [fix]
    if not fix.value.isdecimal():
        raise PlanError(
            "Beside expert parallelism the devices of data parallelism are a count.",
            where="--fix",
            seen=f"{fix.text} and {beside}",
            allowed=f"{fix.key}={2 * count}; or shares of the groups of {count} devices, as in replicas=2:1",
        )
    if int(fix.value) % count:
        raise PlanError(
            "Expert parallelism divides the devices of data parallelism.",
            where="--fix",
            seen=f"{fix.text} and {beside}",
            allowed=f"{fix.key}={max(1, int(fix.value) // count) * count}, or another multiple of {count}",
        )
    replicas = replace(fix, key="dp", value=str(int(fix.value) // count))
    return [replicas] if fix.key == "dp" else [replicas, replace(fix, value="true")]


def check_same_value(key: str, before: FixedText, after: FixedText) -> None:
    """Raise PlanError if two texts give different values to one key."""
    if before.value != after.value:
        raise PlanError(
            f"Two fixes give {key} different values.",
            where="--fix",
            seen=f"{before.typed} and {after.typed}",
            allowed=f"{before.typed}, or {after.typed}",
            next_step=f"leave one of them out; in the planner's names they are {key}={before.value} and "
            f"{key}={after.value}",
        )


def microbatches_of_rows(value: str, typed: str, replicas: int | None, batch: int | None, example: str = "dp=4") -> str:
    """Return the number of microbatches of this many rows on each of the replicas, as text.

    Raises PlanError if the replicas are not fixed, or if the batch does not divide into such microbatches.
    """
    if not value.isdecimal() or int(value) < 1:
        raise PlanError(f"This is not a valid value for {ROWS!r}.", where="--fix", seen=repr(typed), allowed=ROWS_HELP)
    if replicas is None or batch is None:
        raise PlanError(
            "Rows of a microbatch on a replica say how many microbatches there are only with the number of replicas.",
            where="--fix",
            seen=repr(typed),
            next_step=f"add --fix {example}, or use --fix microbatches=8 in place of {typed}",
        )
    rows = int(value) * replicas
    if batch % rows:
        fitting = sorted(
            (count for count in range(1, batch // replicas + 1) if batch % (count * replicas) == 0),
            key=lambda count: (abs(count - int(value)), count),
        )[:4]
        raise PlanError(
            "The batch does not divide into microbatches of this many rows.",
            where="--fix",
            seen=f"batch {batch}, {typed} x dp={replicas} = {rows} rows in a microbatch",
            allowed=", ".join(f"{ROWS}={count}" for count in sorted(fitting))
            or f"dp of {', '.join(map(str, _nearest_divisors(batch, replicas)))}",
        )
    return str(batch // rows)


def _nearest_divisors(number: int, near: int, most: int = 4) -> Iterable[int]:
    """Return the divisors of a number that are closest to another, in rising order."""
    divisors = [count for count in range(1, number + 1) if number % count == 0]
    return sorted(sorted(divisors, key=lambda count: (abs(count - near), count))[:most])
