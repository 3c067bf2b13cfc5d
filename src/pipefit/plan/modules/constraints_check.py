"""Checks of a request for a plan of several modules: the sequence, the documents, and every constraint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.graph import Model
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.plan.request.sequence_length import check_length
from pipefit.plan.request.sliceable import document_obstacles
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.problem import linear_placement

COMMON = ("microbatches", "schedule", "sharded_state", "devices", "modules", "ahead", "balance", "order")
"""Constraints for all modules together."""

OWN = ("replicas", "stages", "shards", "recompute", "devices", "placement", "multiple", "divide")
"""Constraints for each module."""

SIZE = ("replicas", "stages", "shards")
"""A module's number of devices is the product of these."""

APART = ("stages", "devices")
"""Constraints that a module on the devices of another cannot have."""


def check_constraints(model: Model, job: Job, pins: Mapping[str, Any], samples: SampledBatches, devices: int) -> None:
    """Raise PlanError if the request is impossible for a plan of several modules on this number of devices."""
    for module in model.modules:
        if module.space == "samples":
            check_length(module, model, job.sequence, "--seq")
    for error in document_obstacles(model, "--documents") if job.documents == "apart" else ():
        raise error
    names = [module.name for module in model.modules]
    problems = (
        *_pin_problems(model, job, pins),
        *_divide_problems(model, pins, samples),
        *_device_problems(names, pins, devices),
    )
    for error in problems:
        raise error


def _pin_problems(model: Model, job: Job, pins: Mapping[str, Any]) -> Iterator[PlanError]:
    names = [module.name for module in model.modules]
    for key, value in pins.items():
        module, dot, setting = key.rpartition(".")
        if (dot and (module not in names or setting not in OWN)) or (not dot and setting not in COMMON):
            yield PlanError(
                "This cannot be fixed for a model of several modules.",
                where="--fix",
                seen=key,
                allowed=", ".join((*COMMON, *(f"{name}.{name_allowed}" for name in names for name_allowed in OWN))),
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
        elif setting == "microbatches" and job.batch % value:
            yield PlanError(
                "The batch cannot be cut into this many equal microbatches.",
                where="--fix microbatches",
                seen=f"batch {job.batch}, microbatches {value}",
                allowed="a divisor of the batch",
            )
        elif setting == "multiple" and ("microbatches" in pins and pins["microbatches"] % value):
            yield PlanError(
                "The number of microbatches is not a multiple of those a module processes together.",
                where=f"--fix {key}",
                seen=f"{value} of {pins['microbatches']} microbatches",
                allowed="a divisor of the count of microbatches",
            )
        elif setting == "multiple" and value > 1 and len(pins.get(f"{module}.shards", (1,))) > 1:
            yield PlanError(
                "A module that processes several microbatches together cannot be sharded.",
                where=f"--fix {key}",
                seen=f"{value}, {len(pins[f'{module}.shards'])} shards",
                next_step=f"--fix {module}.shards=1: its replicas divide the samples among them",
            )
        elif setting == "schedule" and FAMILIES[value].placement(4) != linear_placement(4):
            yield PlanError(
                "With several modules every lane has one stage, which this schedule does not support.",
                where="--fix schedule",
                seen=value,
                allowed=", ".join(
                    name for name in sorted(FAMILIES) if FAMILIES[name].placement(4) == linear_placement(4)
                ),
            )


def _divide_problems(model: Model, pins: Mapping[str, Any], samples: SampledBatches) -> Iterator[PlanError]:
    for module in model.modules:
        if pins.get(f"{module.name}.divide") == "images" and not samples.images_per_sample(module.space):
            packed = [other_module.name for other_module in model.modules if other_module.space != "samples"]
            yield PlanError(
                "The images of this module's samples cannot be divided among its replicas.",
                where=f"--fix {module.name}.divide",
                seen="it works on whole sequences" if module.space == "samples" else samples.note,
                allowed=f"images for {' and '.join(packed)}, with the data known" if packed else "samples",
                next_step="plan with the data: pipefit plan --data INDEX" if module.name in packed else "drop it",
            )


def _device_problems(names: Sequence[str], pins: Mapping[str, Any], devices: int) -> Iterator[PlanError]:
    """Yield errors for constraints that need more devices than there are.

    They concern a single module, or the modules that cannot share devices.
    """
    if pins.get("devices", 0) > devices:
        yield PlanError(
            "The cluster does not have this many devices.",
            where="--fix devices",
            seen=pins["devices"],
            allowed=f"1 to {devices}",
        )
    need = {name: _least_devices(name, pins) for name in names}
    apart = [
        name
        for name in names
        if pins.get(f"{name}.placement", pins.get("modules")) == "disjoint"
        or any(f"{name}.{key}" in pins for key in APART)
    ]
    limit = min(devices, pins.get("devices", devices))
    for together in (apart, *([name] for name in names)):
        if sum(need[name] for name in together) > limit:
            keys = [f"{name}.{key}" for name in together for key in (*SIZE, "devices") if f"{name}.{key}" in pins]
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


def _least_devices(name: str, pins: Mapping[str, Any]) -> int:
    """Return the minimum number of devices of a module; unconstrained sizes count as one."""
    sizes = (pins.get(f"{name}.{key}", 1) for key in SIZE)
    grid = math.prod(size if isinstance(size, int) else len(size) for size in sizes)
    return max(grid, int(pins.get(f"{name}.devices", 1)))


def sharing_choices(pins: Mapping[str, Any], names: Sequence[str], able: Collection[str]) -> list[frozenset[str]]:
    """Return the choices of modules that share the devices of the largest one.

    These are all subsets of the `able` modules that the constraints allow. Raises PlanError if a constraint cannot be
    obeyed.
    """
    asked = {name: pins.get(f"{name}.placement", pins.get("modules")) for name in names}
    choices = []
    for name in names:
        pinned = [f"{name}.{key}" for key in APART if f"{name}.{key}" in pins]
        together = f"{name}.multiple" in pins
        explicit = pins.get(f"{name}.placement") == "shared" or together
        if together and asked[name] not in (None, "shared"):
            raise PlanError(
                "Only a module that shares devices can process several microbatches together.",
                where=f"--fix {name}.multiple",
                seen=f"{pins[f'{name}.multiple']}, placement {asked[name]}",
                next_step=f"drop it, or --fix {name}.placement=shared",
            )
        if explicit and name not in able:
            raise PlanError(
                "This module cannot share the devices of another.",
                where=f"--fix {name}.{'multiple' if together else 'placement'}",
                seen=pins[f"{name}.multiple"] if together else "shared",
                allowed=f"shared for {', '.join(sorted(able))}" if able else "disjoint for every module of this model",
                next_step="modules at an end of the chain, next to the one with the most work, can share its devices",
            )
        if explicit and pinned:
            raise PlanError(
                "A module that shares devices is complete on every lane: it has no stages or devices of its own.",
                where=f"--fix {name}.placement",
                seen=f"shared, with {', '.join(pinned)}",
                next_step=f"drop --fix {pinned[0]}, or fix {name}.placement=disjoint",
            )
        if name in able and not pinned and asked[name] != "disjoint":
            choices.append(((name,),) if explicit or asked[name] == "shared" else ((), (name,)))
    if pins.get("modules") == "shared" and not choices:
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


def allows_inline(pins: Mapping[str, Any], names: Sequence[str], able: Collection[str]) -> bool:
    """Return whether the `able` modules may be inline with the largest one, all of them on its first or last lane.

    They may if every other module is `able` and no constraint says otherwise. Raises PlanError if inline is requested
    but impossible.
    """
    asked = [key for key, value in pins.items() if value == "inline"]
    beside = [name for name in asked if name.endswith(".placement") and name.rpartition(".")[0] not in able]
    if beside or (asked and len(able) < len(names) - 1):
        raise PlanError(
            "This module cannot be inline with the largest one.",
            where=f"--fix {(beside or asked)[0]}",
            seen="inline",
            allowed=f"inline for {' and '.join(sorted(able))}" if beside and able else "disjoint or shared",
            next_step="every other module has to be next to the one with the most work, at an end of the chain",
        )
    excluded = (*APART, "multiple")
    conflicts = [f"{name}.{key}" for name in names if name in able for key in excluded if f"{name}.{key}" in pins]
    conflicts += [f"{name}.placement" for name in able if pins.get(f"{name}.placement", "inline") != "inline"]
    conflicts += ["modules"] if pins.get("modules", "inline") != "inline" else []
    backbone = next((name for name in names if name not in able), "")
    for name in able:
        conflicts += _other_devices(pins, name, backbone)
    if asked and conflicts:
        raise PlanError(
            "Modules inline with the largest one use its devices, all of them together.",
            where=f"--fix {asked[0]}",
            seen=f"inline, with {', '.join(conflicts)}",
            allowed="shards that divide those of the largest, with replicas times the quotient",
            next_step=f"drop --fix {conflicts[0]}, or --fix {asked[0]}=disjoint",
        )
    return len(able) > 0 and len(able) == len(names) - 1 and not conflicts


def _other_devices(pins: Mapping[str, Any], name: str, backbone: str) -> list[str]:
    """Return the constraints that prevent the module and the backbone from using the same devices of a lane."""
    conflicts, size = [], {}
    for key in ("replicas", "shards"):
        for module in (name, backbone):
            if f"{module}.{key}" in pins:
                size[module, key] = len(pins[f"{module}.{key}"])
    for key, larger, smaller in (("replicas", name, backbone), ("shards", backbone, name)):
        if (larger, key) in size and (smaller, key) in size and size[larger, key] % size[smaller, key]:
            conflicts += [f"{name}.{key}", f"{backbone}.{key}"]
    if not conflicts and len(size) == 4:
        devices = {module: size[module, "replicas"] * size[module, "shards"] for module in (name, backbone)}
        conflicts += [f"{name}.replicas", f"{backbone}.replicas"] if len({*devices.values()}) > 1 else []
    return conflicts
