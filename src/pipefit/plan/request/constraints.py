"""Constraints of a plan: `--fix KEY=VALUE`. Every key states its values, and every error the allowed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.errors import PlanError, most_like
from pipefit.optimizers.sharded_state import LEGACY_KEY, check_sharded_state, decode_decisions
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.schedule.families import FAMILIES


@dataclass(frozen=True, slots=True)
class ConstraintKey:
    """A key of `--fix`, with its help text and parser."""

    help: str
    parse: Callable[[str], Any]


def _parse_shares(text: str) -> tuple[int, ...]:
    """Parse `4` as four even shares, `2:1:1` as three uneven ones."""
    if ":" in text:
        shares = tuple(int(part) for part in text.split(":"))
    else:
        shares = (1,) * int(text)
    if not shares or min(shares) < 1:
        raise ValueError(text)
    return shares


def _parse_count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parse_slices(text: str) -> int | tuple[int, ...]:
    """Parse `4` as four slices of equal cost, `1` as no slicing, `512,512` as the tokens of each slice."""
    return _parse_numbers(text) if "," in text else _parse_count(text)


def _choice_parser(*values: str) -> Callable[[str], str]:
    def parse_choice(text: str) -> str:
        if text not in values:
            raise ValueError(text)
        return text

    return parse_choice


def _parse_placement(text: str) -> str | tuple[int, ...]:
    """Parse `shared`, `inline` or `disjoint` for a module, or the lanes of all stages."""
    return text if text in ("shared", "inline", "disjoint") else _parse_numbers(text)


def _parse_recompute(text: str) -> tuple[str, ...]:
    return tuple(_choice_parser("none", "selective", "full")(part) for part in text.split(","))


def _parse_switch(text: str) -> bool:
    return {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}[text.lower()]


def _parse_mapping(text: str) -> str | tuple[int, ...]:
    return text if text in ("hostname", "search") else _parse_numbers(text)


KEYS: Mapping[str, ConstraintKey] = {
    "replicas": ConstraintKey("a count, or shares such as 2:1", _parse_shares),
    "stages": ConstraintKey("a count", _parse_count),
    "shards": ConstraintKey("a count, or shares such as 2:1", _parse_shares),
    "sharding": ConstraintKey(
        "none, megatron, megatron-sp or searched", _choice_parser("none", "megatron", "megatron-sp", "searched")
    ),
    "microbatches": ConstraintKey("a count that divides the batch", _parse_count),
    "schedule": ConstraintKey(", ".join(sorted(FAMILIES)), _choice_parser(*FAMILIES)),
    "recompute": ConstraintKey("none, selective or full; or one of them for each stage, with commas", _parse_recompute),
    "sharded_state": ConstraintKey(
        "none or optimizer: the state that the replicas shard (ZeRO-1)",
        lambda text: check_sharded_state(text, "--fix sharded_state"),
    ),
    "inner": ConstraintKey(
        "replica or stage: adjacent ranks are the replicas of a stage, or the stages of a pipeline",
        _choice_parser("replica", "stage"),
    ),
    "devices": ConstraintKey("a count: how many devices take part", _parse_count),
    "cuts": ConstraintKey("first layer of every stage but the first, with commas", _parse_numbers),
    "slices": ConstraintKey(
        "a count of slices of equal cost (1: sequences are not cut), or the tokens of each, with commas", _parse_slices
    ),
    "slice_multiple": ConstraintKey(
        "tokens that every slice is a multiple of; the last slice also takes the remainder", _parse_count
    ),
    "placement": ConstraintKey(
        "lane of every stage, with commas; for one of several modules: disjoint, shared or inline", _parse_placement
    ),
    "modules": ConstraintKey(
        "disjoint, shared or inline: separate devices, those of the largest module, or its first and last lane",
        _choice_parser("disjoint", "shared", "inline"),
    ),
    "multiple": ConstraintKey("a count of microbatches per call of a module on shared devices", _parse_count),
    "divide": ConstraintKey(
        "samples or images: the part of a microbatch that the replicas of a module divide",
        _choice_parser("samples", "images"),
    ),
    "ahead": ConstraintKey("a count of units that a module on shared devices may run ahead", _parse_count),
    "balance": ConstraintKey(
        "true or false: balance unequal samples over replicas and microbatches",
        _parse_switch,
    ),
    "order": ConstraintKey("true or false: reorder unequal microbatches within their pipeline", _parse_switch),
    "groups": ConstraintKey("true or false: also search groups of devices with searched programs", _parse_switch),
    "mapping": ConstraintKey(
        "hostname, search, or the device of every lane, replica and shard, with commas", _parse_mapping
    ),
}


MODULES_ALONE = ("modules", "ahead", "multiple", "divide", "balance", "order")
"""Keys that apply only to models of several modules."""


def parse_constraints(texts: Iterable[str]) -> dict[str, Any]:
    """Return the constraints of the `--fix` options. Raises PlanError for an unknown key, a bad value, or a repeated
    key."""
    pins: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.strip()
        if name == LEGACY_KEY:
            name, value = next(iter(decode_decisions({name: value.strip().lower()}).items()))
        key = name.rpartition(".")[2]  # `vision.replicas`: of one module
        if not separator or key not in KEYS:
            near = most_like(key, KEYS)
            raise PlanError(
                f"--fix has no key {name!r}." if separator else "A constraint is written KEY=VALUE.",
                where="--fix",
                seen=repr(text),
                allowed=", ".join(f"{key} ({entry.help})" for key, entry in KEYS.items()),
                next_step=f"did you mean {near[0]}?" if near else None,
            )
        if name in pins:
            raise PlanError("The same key is fixed twice.", where="--fix", seen=repr(text))
        try:
            pins[name] = KEYS[key].parse(value.strip())
        except PlanError:
            raise
        except (ValueError, KeyError):
            raise PlanError(
                f"This is not a valid value for {name!r}.", where="--fix", seen=repr(text), allowed=KEYS[key].help
            ) from None
    _check_together(pins)
    return pins


def check_one_module(pins: Mapping[str, Any]) -> None:
    """Raise PlanError for a constraint that applies only to models of several modules."""
    for key, value in pins.items():
        if "." in key or key in MODULES_ALONE or (key == "placement" and isinstance(value, str)):
            raise PlanError(
                "This can be fixed only for a model of several modules, and this one has no modules.",
                where="--fix",
                seen=f"{key}={value}" if key == "placement" else key,
                allowed=", ".join(name for name in KEYS if name not in MODULES_ALONE),
                next_step="name the lane of every stage, as in placement=0,1"
                if key == "placement"
                else f"leave {key} out",
            )


def _check_together(pins: Mapping[str, Any]) -> None:
    stages = {len(pins["cuts"]) + 1} if "cuts" in pins else set()
    stages |= {pins["stages"]} if "stages" in pins else set()
    stages |= {len(pins["placement"])} if isinstance(pins.get("placement"), tuple) else set()
    if len(stages) > 1:
        raise PlanError(
            "These constraints mean different numbers of stages.",
            where="--fix stages, cuts, placement",
            seen=", ".join(map(str, sorted(stages))),
            next_step="cuts name one layer fewer than there are stages; a placement names a lane for each stage",
        )
    sharded = pins.get("sharding", "megatron-sp") != "none"
    if "shards" in pins and (len(pins["shards"]) > 1) != sharded and "sharding" in pins:
        raise PlanError(
            "More than one shard needs a sharding, and a sharding more than one shard.",
            where="--fix shards, sharding",
            seen=f"shards={len(pins['shards'])}, sharding={pins['sharding']}",
            allowed="shards=2 with sharding=megatron, megatron-sp or searched",
        )
    if pins.get("sharding", "none") != "none" and "shards" not in pins:
        raise PlanError(
            "A sharding needs the number of shards.",
            where="--fix sharding",
            seen=pins["sharding"],
            next_step="add --fix shards=2",
        )


def describe_choices(decisions: ParallelConfig) -> str:
    """Return the choices as one short line."""
    if isinstance(decisions, MultiModuleConfig):
        return decisions.to_text()
    shards = f" x {len(decisions.shards)} shards ({decisions.sharding})" if len(decisions.shards) > 1 else ""
    slices = f" x {len(decisions.slices)} slices" if decisions.slices else ""
    return (
        f"{len(decisions.replicas)} replicas x {decisions.stage_count} stages{shards}, "
        f"{decisions.microbatches} microbatches{slices}, {decisions.schedule}, "
        f"recompute {','.join(decisions.recompute)}, sharded state {decisions.sharded_state}"
    )
