"""Checks of a request for a plan of several modules: the sequence, the documents, and every constraint."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.graph import Model
from pipefit.optimizers.sharded_state import STATES_UP_TO_ZERO_1
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.plan.request.sequence_length import check_length
from pipefit.plan.request.sliceable import document_obstacles
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.problem import linear_placement

COMMON_KEYS = ("microbatches", "schedule", "sharded_state", "devices", "modules", "ahead", "balance", "order")
"""Constraints for all modules together."""

MODULE_KEYS = ("replicas", "stages", "shards", "recompute", "devices", "placement", "multiple", "divide")
"""Constraints for each module."""

SIZE = ("replicas", "stages", "shards")
"""A module's number of devices is the product of these."""

OWN_DEVICES_ONLY = ("stages", "devices")
"""Constraints that a module on the devices of another cannot have."""


def check_constraints(model: Model, job: Job, constraints: Constraints, samples: SampledBatches, devices: int) -> None:
    """Raise PlanError if the request is impossible for a plan of several modules on this number of devices."""
    for module in model.modules:
        if module.space == "samples":
            check_length(module, model, job.sequence, "--seq")
    for error in document_obstacles(model, "--documents") if job.documents == "apart" else ():
        raise error
    names = [module.name for module in model.modules]
    problems = (
        *_key_problems(model, job, constraints),
        *_divide_problems(model, constraints, samples),
        *_device_problems(names, constraints, devices),
    )
    for error in problems:
        raise error


def _key_problems(model: Model, job: Job, constraints: Constraints) -> Iterator[PlanError]:
    names = [module.name for module in model.modules]
    for key, value in constraints.to_mapping().items():
        module, dot, setting = key.rpartition(".")
        if (dot and (module not in names or setting not in MODULE_KEYS)) or (not dot and setting not in COMMON_KEYS):
            yield PlanError(
                "This cannot be fixed for a model of several modules.",
                where="--fix",
                seen=key,
                allowed=", ".join(
                    (*COMMON_KEYS, *(f"{name}.{name_allowed}" for name in names for name_allowed in MODULE_KEYS))
                ),
            )
        elif setting == "microbatches" and job.batch % value:
            yield PlanError(
                "The batch cannot be cut into this many equal microbatches.",
                where="--fix microbatches",
                seen=f"batch {job.batch}, microbatches {value}",
                allowed="a divisor of the batch",
            )
        elif setting == "multiple":
            yield from _multiple_problems(key, value, constraints)
        else:
            yield from _layout_problems(key, value)


def _layout_problems(key: str, value: Any) -> Iterator[PlanError]:
    """Yield errors for a value that only a plan of one module can have."""
    setting = key.rpartition(".")[2]
    if setting == "sharded_state" and value not in STATES_UP_TO_ZERO_1:
        yield PlanError(
            "With several modules, the replicas of a module can shard only the optimizer state.",
            where="--fix sharded_state",
            seen=value,
            allowed=", ".join(STATES_UP_TO_ZERO_1),
        )
    elif setting in ("replicas", "shards") and len({*value}) > 1:
        yield PlanError(
            "With several modules, all replicas and shards of a module are of the same size.",
            where=f"--fix {key}",
            seen=":".join(map(str, value)),
            next_step=f"--fix {key}={len(value)}",
        )
    elif setting == "recompute" and len(value) > 1:
        yield PlanError(
            "With several modules, all stages of a module use the same activation recomputation.",
            where=f"--fix {key}",
            seen=",".join(value),
            allowed="none, selective or full",
        )
    elif setting == "placement" and not isinstance(value, str):
        yield PlanError(
            "A module has its own devices, or shares those of the largest one: on every lane, or inline at an end.",
            where=f"--fix {key}",
            seen=",".join(map(str, value)),
            allowed="disjoint, shared or inline",
        )
    elif setting == "schedule" and FAMILIES[value].placement(4) != linear_placement(4):
        linear = [name for name in sorted(FAMILIES) if FAMILIES[name].placement(4) == linear_placement(4)]
        yield PlanError(
            "With several modules every lane has one stage, which this schedule does not support.",
            where="--fix schedule",
            seen=value,
            allowed=", ".join(linear),
        )


def _multiple_problems(key: str, value: int, constraints: Constraints) -> Iterator[PlanError]:
    """Yield errors for a number of microbatches that a module cannot process together."""
    module, microbatches = key.rpartition(".")[0], constraints.microbatches
    if microbatches is not None and microbatches % value:
        yield PlanError(
            "The number of microbatches is not a multiple of those a module processes together.",
            where=f"--fix {key}",
            seen=f"{value} of {microbatches} microbatches",
            allowed="a divisor of the count of microbatches",
        )
    elif value > 1 and constraints.of_module(module).shard_count > 1:
        yield PlanError(
            "A module that processes several microbatches together cannot be sharded.",
            where=f"--fix {key}",
            seen=f"{value}, {constraints.of_module(module).shard_count} shards",
            next_step=f"--fix {module}.shards=1: its replicas divide the samples among them",
        )


def _divide_problems(model: Model, constraints: Constraints, samples: SampledBatches) -> Iterator[PlanError]:
    for module in model.modules:
        if constraints.of_module(module.name).divide == "images" and not samples.images_per_sample(module.space):
            packed = [other_module.name for other_module in model.modules if other_module.space != "samples"]
            yield PlanError(
                "The images of this module's samples cannot be divided among its replicas.",
                where=f"--fix {module.name}.divide",
                seen="it works on whole sequences" if module.space == "samples" else samples.note,
                allowed=f"images for {' and '.join(packed)}, with the data known" if packed else "samples",
                next_step="plan with the data: pipefit plan --data INDEX" if module.name in packed else "drop it",
            )


def _device_problems(names: Sequence[str], constraints: Constraints, devices: int) -> Iterator[PlanError]:
    """Yield errors for constraints that need more devices than there are.

    They concern a single module, or the modules that cannot share devices.
    """
    if (constraints.devices or 0) > devices:
        yield PlanError(
            "The cluster does not have this many devices.",
            where="--fix devices",
            seen=constraints.devices,
            allowed=f"1 to {devices}",
        )
    need = {name: _least_devices(name, constraints) for name in names}
    apart = [
        name
        for name in names
        if _placement_of(name, constraints) == "disjoint" or _fixed_keys(name, OWN_DEVICES_ONLY, constraints)
    ]
    limit = min(devices, constraints.devices or devices)
    for together in (apart, *([name] for name in names)):
        if sum(need[name] for name in together) > limit:
            keys = [key for name in together for key in _fixed_keys(name, (*SIZE, "devices"), constraints)]
            needs = " + ".join(f"{need[name]} for {name}" for name in together)
            fewer = "fewer replicas, stages, shards or devices of a module"
            yield PlanError(
                "The modules need more devices than there are.",
                where=f"--fix {', '.join(keys or ['modules'])}",
                seen=f"{needs} = {sum(need[name] for name in together)}" if len(together) > 1 else needs,
                allowed=f"{limit} devices",
                next_step=f"{fewer}, or let modules share devices: drop their disjoint, stages and devices"
                if len(together) > 1
                else fewer,
            )


def _least_devices(name: str, constraints: Constraints) -> int:
    """Return the minimum number of devices of a module; unconstrained sizes count as one."""
    fixed = constraints.of_module(name)
    return max(fixed.replica_count * (fixed.stages or 1) * fixed.shard_count, fixed.devices or 1)


def _placement_of(name: str, constraints: Constraints) -> object:
    """Return the fixed placement of a module: its own, or the one for all modules; None if it is free."""
    return constraints.of_module(name).placement or constraints.modules


def _fixed_keys(name: str, keys: Sequence[str], constraints: Constraints) -> list[str]:
    """Return the fixed ones among the keys of a module, with its name in front."""
    fixed = constraints.of_module(name).to_mapping()
    return [f"{name}.{key}" for key in keys if key in fixed]


def inline_requests(constraints: Constraints) -> list[str]:
    """Return the keys by which modules are fixed inline with the largest one."""
    return [key for key, value in constraints.to_mapping().items() if value == "inline"]


def sharing_choices(constraints: Constraints, names: Sequence[str], able: Collection[str]) -> list[frozenset[str]]:
    """Return the choices of modules that share the devices of the largest one.

    These are all subsets of the `able` modules that the constraints allow. Raises PlanError if a constraint cannot be
    obeyed.
    """
    choices: list[tuple[tuple[str, ...], ...]] = []
    for name in names:
        module, placement = constraints.of_module(name), _placement_of(name, constraints)
        fixed_devices = _fixed_keys(name, OWN_DEVICES_ONLY, constraints)
        explicit = module.placement == "shared" or module.multiple is not None
        if explicit:
            _check_shared(name, constraints, able)
        if name in able and not fixed_devices and placement != "disjoint":
            choices.append(((name,),) if explicit or placement == "shared" else ((), (name,)))
    if constraints.modules == "shared" and not choices:
        raise PlanError(
            "No module can share the devices of another.",
            where="--fix modules",
            seen="shared",
            allowed="disjoint"
            if not able
            else f"shared, for {', '.join(sorted(able))} without --fix of their own devices",
            next_step="modules at an end of the chain, beside the one with most work, can share its devices",
        )
    return [frozenset(itertools.chain.from_iterable(subsets)) for subsets in itertools.product(*choices)]


def _check_shared(name: str, constraints: Constraints, able: Collection[str]) -> None:
    """Raise PlanError if a module that the constraints put on the devices of another cannot be there."""
    multiple, placement = constraints.of_module(name).multiple, _placement_of(name, constraints)
    fixed_devices = _fixed_keys(name, OWN_DEVICES_ONLY, constraints)
    if multiple is not None and placement not in (None, "shared"):
        raise PlanError(
            "Only a module that shares devices can process several microbatches together.",
            where=f"--fix {name}.multiple",
            seen=f"{multiple}, placement {placement}",
            next_step=f"drop it, or --fix {name}.placement=shared",
        )
    if name not in able:
        raise PlanError(
            "This module cannot share the devices of another.",
            where=f"--fix {name}.{'placement' if multiple is None else 'multiple'}",
            seen="shared" if multiple is None else multiple,
            allowed=f"shared for {', '.join(sorted(able))}" if able else "disjoint for every module of this model",
            next_step="modules at an end of the chain, next to the one with the most work, can share its devices",
        )
    if fixed_devices:
        raise PlanError(
            "A module that shares devices is complete on every lane: it has no stages or devices of its own.",
            where=f"--fix {name}.placement",
            seen=f"shared, with {', '.join(fixed_devices)}",
            next_step=f"drop --fix {fixed_devices[0]}, or fix {name}.placement=disjoint",
        )


def allows_inline(constraints: Constraints, names: Sequence[str], able: Collection[str]) -> bool:
    """Return whether the `able` modules may be inline with the largest one, all of them on its first or last lane.

    They may if every other module is `able` and no constraint says otherwise. Raises PlanError if inline is requested
    but impossible.
    """
    asked = inline_requests(constraints)
    beside = [name for name in asked if name.endswith(".placement") and name.rpartition(".")[0] not in able]
    if beside or (asked and len(able) < len(names) - 1):
        raise PlanError(
            "This module cannot be inline with the largest one.",
            where=f"--fix {(beside or asked)[0]}",
            seen="inline",
            allowed=f"inline for {' and '.join(sorted(able))}" if beside and able else "disjoint or shared",
            next_step="every other module has to be next to the one with the most work, at an end of the chain",
        )
    excluded = (*OWN_DEVICES_ONLY, "multiple")
    conflicts = [key for name in names if name in able for key in _fixed_keys(name, excluded, constraints)]
    conflicts += [f"{name}.placement" for name in able if constraints.of_module(name).placement not in (None, "inline")]
    conflicts += ["modules"] if constraints.modules not in (None, "inline") else []
    backbone = next((name for name in names if name not in able), "")
    for name in able:
        conflicts += _other_devices(constraints, name, backbone)
    if asked and conflicts:
        raise PlanError(
            "Modules inline with the largest one use its devices, all of them together.",
            where=f"--fix {asked[0]}",
            seen=f"inline, with {', '.join(conflicts)}",
            allowed="shards that divide those of the largest, with replicas times the quotient",
            next_step=f"drop --fix {conflicts[0]}, or --fix {asked[0]}=disjoint",
        )
    return len(able) > 0 and len(able) == len(names) - 1 and not conflicts


def _other_devices(constraints: Constraints, name: str, backbone: str) -> list[str]:
    """Return the constraints that prevent the module and the backbone from using the same devices of a lane."""
    conflicts, size = [], {}
    for key in ("replicas", "shards"):
        for module in (name, backbone):
            shares = getattr(constraints.of_module(module), key)
            if shares is not None:
                size[module, key] = len(shares)
    for key, larger, smaller in (("replicas", name, backbone), ("shards", backbone, name)):
        if (larger, key) in size and (smaller, key) in size and size[larger, key] % size[smaller, key]:
            conflicts += [f"{name}.{key}", f"{backbone}.{key}"]
    if not conflicts and len(size) == 4:
        devices = {module: size[module, "replicas"] * size[module, "shards"] for module in (name, backbone)}
        conflicts += [f"{name}.replicas", f"{backbone}.replicas"] if len({*devices.values()}) > 1 else []
    return conflicts
