"""Constraints of a plan, `Constraints(stages=4)` in Python and `--fix stages=4` on the command line.

Every key of `--fix` is a field that states its values, and every error names the allowed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipefit.errors import PlanError, suggest_name
from pipefit.optimizers.sharded_state import ShardedState, check_sharded_state
from pipefit.plan.request.aliases import (
    ALIASES,
    ROWS,
    ROWS_HELP,
    UNAVAILABLE,
    FixedText,
    TypedFix,
    check_module_fixes,
    check_same_value,
    translate_fixes,
)
from pipefit.plan.request.decisions import Inner, ParallelConfig, Sharding
from pipefit.plan.request.expert_parts import TENSOR_SHARDING, check_expert_axis, check_expert_state
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.state_groups import check_state_group
from pipefit.plan.types import Divide, Recompute
from pipefit.schedule.families import FAMILIES

ModulePlacement = Literal["disjoint", "shared", "inline"]
"""A module on separate devices, on those of the largest module, or on its first or last lane."""


@dataclass(frozen=True, slots=True)
class ConstraintKey:
    """A key of `--fix`, with its help text and parser."""

    text: str | Callable[[], str]
    parse: Callable[[str], Any]

    @property
    def help(self) -> str:
        """The values that the key takes."""
        return self.text if isinstance(self.text, str) else self.text()


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


def _parse_group(text: str) -> int:
    """Parse `8` as groups of eight, `all` as one group (0)."""
    if text != "all" and int(text) < 2:
        raise ValueError(text)
    return 0 if text == "all" else int(text)


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


def _family_names() -> str:
    """Return the names of all schedule families, those of plug-ins included."""
    return ", ".join(sorted(FAMILIES))


def _parse_family(text: str) -> str:
    return _choice_parser(*FAMILIES)(text)


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
    "context": ConstraintKey("a count: devices that hold parts of each sequence", _parse_count),
    "expert": ConstraintKey("a count: groups of shards that divide rows, and with the shards experts", _parse_count),
    "sharding": ConstraintKey(
        "none, megatron, megatron-sp, expert or searched",
        _choice_parser("none", "megatron", "megatron-sp", "expert", "searched"),
    ),
    "microbatches": ConstraintKey("a count that divides the batch", _parse_count),
    "schedule": ConstraintKey(_family_names, _parse_family),
    "recompute": ConstraintKey("none, selective or full; or one of them for each stage, with commas", _parse_recompute),
    "sharded_state": ConstraintKey(
        "none, optimizer, gradients or parameters: the state that the replicas shard (ZeRO)",
        lambda text: check_sharded_state(text, "--fix sharded_state"),
    ),
    "state_group": ConstraintKey(
        "a count of neighbouring replicas that shard that state together (HSDP), or all", _parse_group
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
"""Keys of `--fix`, in the order of the fields of `Constraints`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Choices that the user fixed; None leaves a choice to the planner. Every field but the last is a key of `--fix`.

    `Constraints(stages=4, recompute=("full",))` equals `--fix stages=4 --fix recompute=full`.
    """

    replicas: tuple[int, ...] | None = None
    "Shares of the replicas: (1, 1) is two even ones, (2, 1) assigns two thirds of the rows to the first."
    stages: int | None = None
    "Number of pipeline stages."
    shards: tuple[int, ...] | None = None
    "Shares of the devices among which each layer is split."
    context: int | None = None
    "Number of devices that hold parts of each sequence; None: 1, until a pass of its own searches other sizes."
    expert: int | None = None
    "Number of groups of shards that divide rows, and with the shards experts; None: free if the shards are."
    sharding: Sharding | None = None
    "The SPMD program over the shards."
    microbatches: int | None = None
    "Number of microbatches of a step."
    schedule: str | None = None
    "A name of `schedule.families.FAMILIES`."
    recompute: tuple[Recompute, ...] | None = None
    "Activation recomputation: one entry for all stages, or one per stage."
    sharded_state: ShardedState | None = None
    "The training state that the replicas shard: none, or that of ZeRO-1, 2 or 3."
    state_group: int | None = None
    "Number of neighbouring replicas that shard that state together, 0: all; None: 0, until a pass tries other sizes."
    inner: Inner | None = None
    "Rank order: adjacent ranks are the replicas of a stage, or the stages of a pipeline."
    devices: int | None = None
    "Number of devices that take part."
    cuts: tuple[int, ...] | None = None
    "First layer of every stage but the first."
    slices: int | tuple[int, ...] | None = None
    "Number of slices of equal cost (1: sequences are not sliced), or the tokens of each slice."
    slice_multiple: int | None = None
    "Tokens that every slice is a multiple of; the last slice also takes the remainder."
    placement: ModulePlacement | tuple[int, ...] | None = None
    "Lane of every stage; for one of several modules, its placement."
    modules: ModulePlacement | None = None
    "Placement of all modules beside the largest."
    multiple: int | None = None
    "Microbatches per call of a module on shared devices."
    divide: Divide | None = None
    "The part of a microbatch that the replicas of a module divide."
    ahead: int | None = None
    "Units that a module on shared devices may run ahead."
    balance: bool | None = None
    "Balance unequal samples over replicas and microbatches."
    order: bool | None = None
    "Reorder unequal microbatches within their pipeline."
    groups: bool | None = None
    "Also search groups of devices with searched programs."
    mapping: Literal["hostname", "search"] | tuple[int, ...] | None = None
    "Devices in hostname order, searched, or given for every (lane, replica, shard), the last fastest."
    per_module: Mapping[str, Constraints] = field(default_factory=dict)
    "Constraints of single modules by name, for models of several: `--fix vision.replicas=2`."

    @property
    def replica_count(self) -> int:
        """Fixed number of replicas; 1 if it is free."""
        return len(self.replicas or (1,))

    @property
    def shard_count(self) -> int:
        """Fixed number of shards; 1 if it is free."""
        return len(self.shards or (1,))

    @property
    def context_size(self) -> int:
        """Fixed number of parts of a sequence; 1 if it is free."""
        return self.context or 1

    @property
    def expert_size(self) -> int:
        """Fixed size of the expert axis; 1 if it is free."""
        return self.expert or 1

    @property
    def shard_devices(self) -> int:
        """Devices that divide the experts of a layer: the shards of all positions of the expert axis."""
        return self.expert_size * self.shard_count

    @property
    def devices_per_replica(self) -> int:
        """Devices of one replica of a stage: parts of the sequence times positions of the expert axis times shards."""
        return self.context_size * self.shard_devices

    @property
    def stage_count(self) -> int | None:
        """Number of stages that `stages` or `cuts` fix."""
        return self.stages if self.stages is not None or self.cuts is None else len(self.cuts) + 1

    @property
    def lane_of_stage(self) -> tuple[int, ...] | None:
        """Lane of every stage, if `placement` fixes it."""
        return self.placement if isinstance(self.placement, tuple) else None

    def of_module(self, name: str) -> Constraints:
        """Return the constraints of one of several modules; those for all modules are not repeated in it."""
        return self.per_module.get(name, NO_CONSTRAINTS)

    def to_mapping(self) -> dict[str, Any]:
        """Return the fixed values by their `--fix` key; keys of single modules have their name in front."""
        fixed = {key: value for key in KEYS if (value := getattr(self, key)) is not None}
        for name, constraints in self.per_module.items():
            fixed.update({f"{name}.{key}": value for key, value in constraints.to_mapping().items()})
        return fixed

    @property
    def with_context_defaults(self) -> Constraints:
        """The constraints; sequences that are split over devices are not sliced."""
        return self.with_defaults(slices=1) if self.context_size > 1 else self

    def with_defaults(self, **values: Any) -> Constraints:
        """Return the constraints with these values in the fields that are free."""
        return replace(self, **{key: value for key, value in values.items() if getattr(self, key) is None})


NO_CONSTRAINTS = Constraints()
"""Every choice is left to the planner."""

MODULES_ALONE = ("modules", "ahead", "multiple", "divide", "balance", "order")
"""Keys that apply only to models of several modules."""


def parse_constraints(texts: Iterable[str], batch: int | None = None) -> Constraints:
    """Return the constraints of the `--fix` options. A key is a field of `Constraints` or an alias of it.

    `batch`, the sequences of a step, is needed for the alias `mbs` only. Raises PlanError for an unknown key, a bad
    value, a repeated key, two keys that contradict each other, and an axis that plans do not have.
    """
    typed = [_split_fix(text) for text in texts]
    names = [name for name, _, _ in typed]
    for index, (name, _, text) in enumerate(typed):
        if name in names[:index]:
            before = typed[names.index(name)][2]
            raise PlanError("The same key is fixed twice.", where="--fix", seen=f"{before!r} and {text!r}")
    fixed: dict[str, FixedText] = {}
    for prefix in dict.fromkeys(name.rpartition(".")[0] for name in names):
        fixes = [TypedFix(name.rpartition(".")[2], *rest) for name, *rest in typed if name.rpartition(".")[0] == prefix]
        if prefix:
            check_module_fixes(fixes)
        for key, entry in translate_fixes(fixes, batch):
            check_same_value(key, fixed.setdefault(f"{prefix}.{key}" if prefix else key, entry), entry)
    constraints = _group_by_module({name: _parse_value(name, entry) for name, entry in fixed.items()})
    check_agreement(constraints)
    return constraints


def _split_fix(text: str) -> tuple[str, str, str]:
    """Return (name, value, text) of `KEY=VALUE`. Raises PlanError for an unknown key."""
    name, separator, value = text.partition("=")
    name = name.strip()
    key = name.rpartition(".")[2]  # `vision.replicas`: of one module
    if not separator or key not in {*KEYS, *ALIASES, *UNAVAILABLE, ROWS}:
        raise PlanError(
            f"--fix has no key {name!r}." if separator else "A constraint is written KEY=VALUE.",
            where="--fix",
            seen=repr(text),
            allowed=", ".join(f"{key} ({entry.help})" for key, entry in KEYS.items())
            + "; or "
            + ", ".join(f"{key} ({entry.help})" for key, entry in ALIASES.items())
            + f", {ROWS} ({ROWS_HELP})",
            next_step=suggest_name(key, (*KEYS, *ALIASES, ROWS)),
        )
    return name, value.strip(), text.strip()


def _parse_value(name: str, entry: FixedText) -> Any:
    """Return the value of a key of `--fix`. Raises PlanError if it is not one of the key's values."""
    key = name.rpartition(".")[2]
    try:
        return KEYS[key].parse(entry.value)
    except PlanError:
        raise
    except (ValueError, KeyError):
        raise PlanError(
            f"This is not a valid value for {name!r}.", where="--fix", seen=repr(entry.typed), allowed=KEYS[key].help
        ) from None


def _group_by_module(values: Mapping[str, Any]) -> Constraints:
    """Return the constraints of values by their `--fix` key, those of single modules apart."""
    shared: dict[str, Any] = {}
    per_module: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        module, dot, key = name.rpartition(".")
        (per_module.setdefault(module, {}) if dot else shared)[key] = value
    return Constraints(**shared, per_module={name: Constraints(**fixed) for name, fixed in per_module.items()})


def check_one_module(constraints: Constraints) -> None:
    """Raise PlanError for constraints that contradict each other, or apply only to models of several modules."""
    check_agreement(constraints)
    for key, value in constraints.to_mapping().items():
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


def check_agreement(constraints: Constraints) -> None:
    """Raise PlanError for constraints that contradict each other."""
    shards, sharding = constraints.shards, constraints.sharding
    stages = {len(constraints.cuts) + 1} if constraints.cuts is not None else set()
    stages |= {constraints.stages} if constraints.stages is not None else set()
    stages |= {len(constraints.lane_of_stage)} if constraints.lane_of_stage is not None else set()
    if len(stages) > 1:
        raise PlanError(
            "These constraints mean different numbers of stages.",
            where="--fix stages, cuts, placement",
            seen=", ".join(map(str, sorted(stages))),
            next_step="cuts name one layer fewer than there are stages; a placement names a lane for each stage",
        )
    if shards is not None and sharding is not None and (len(shards) > 1) != (sharding != "none"):
        raise PlanError(
            "More than one shard needs a sharding, and a sharding more than one shard.",
            where="--fix shards, sharding",
            seen=f"shards={len(shards)}, sharding={sharding}",
            allowed="shards=2 with sharding=megatron, megatron-sp, expert or searched",
        )
    check_expert_constraints(constraints)
    check_state_group(
        constraints.state_group or 0,
        constraints.sharded_state,
        constraints.replicas or (1,) * (constraints.state_group or 1),
        constraints.context_size,
        "--fix state_group",
    )
    if sharding not in (None, "none") and shards is None:
        raise PlanError(
            "A sharding needs the number of shards.",
            where="--fix sharding",
            seen=sharding,
            next_step="add --fix shards=2",
        )


def check_expert_constraints(constraints: Constraints) -> None:
    """Raise PlanError for expert parallelism that contradicts other constraints."""
    expert, shards = constraints.expert_size, constraints.shards or (1,)
    named = constraints.sharding or (TENSOR_SHARDING if len(shards) > 1 else "none")
    check_expert_axis(expert, named, shards, "--fix expert, shards, sharding")
    group = constraints.state_group or 0
    check_expert_state(constraints.sharding, group, "--fix sharding, state_group", expert)


def describe_choices(decisions: ParallelConfig) -> str:
    """Return the choices as one short line."""
    if isinstance(decisions, MultiModuleConfig):
        return decisions.to_text()
    shards = f" x {len(decisions.shards)} shards ({decisions.sharding})" if len(decisions.shards) > 1 else ""
    context = f" x {decisions.context} parts of sequences" if decisions.context > 1 else ""
    context += f" x {decisions.expert} expert parts" if decisions.expert > 1 else ""
    slices = f" x {len(decisions.slices)} slices" if decisions.slices else ""
    groups = f" in groups of {decisions.hybrid_group}" if decisions.hybrid_group else ""
    return (
        f"{len(decisions.replicas)} replicas x {decisions.stage_count} stages{context}{shards}, "
        f"{decisions.microbatches} microbatches{slices}, {decisions.schedule}, "
        f"recompute {','.join(decisions.recompute)}, sharded state {decisions.sharded_state}{groups}"
    )
