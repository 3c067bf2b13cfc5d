"""Whether a plan of several modules can be made as it is asked for: the sequence, the documents, and every pin."""

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

COMMON = ("microbatches", "schedule", "zero1", "devices", "modules", "ahead", "balance", "order")
"""What can be pinned for all modules together."""

OWN = ("replicas", "stages", "shards", "recompute", "devices", "placement", "multiple", "divide")
"""What can be pinned for each."""

SIZE = ("replicas", "stages", "shards")
"""What a module's devices are the product of."""

APART = ("stages", "devices")
"""What a module that shares the devices of another does not have."""


def check_constraints(model: Model, job: Job, pins: Mapping[str, Any], samples: SampledBatches, devices: int) -> None:
    """Raises PlanError for what a plan of several modules cannot be on so many devices."""
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
        module, dot, own = key.rpartition(".")
        if (dot and (module not in names or own not in OWN)) or (not dot and own not in COMMON):
            yield PlanError(
                "This cannot be fixed for a model of several modules.",
                where="--fix",
                seen=key,
                allowed=", ".join((*COMMON, *(f"{name}.{one}" for name in names for one in OWN))),
            )
        elif own in ("replicas", "shards") and len({*value}) > 1:
            yield PlanError(
                "The replicas and shards of a module are even where there are several modules.",
                where=f"--fix {key}",
                seen=":".join(map(str, value)),
                next_step=f"--fix {key}={len(value)}",
            )
        elif own == "recompute" and len(value) > 1:
            yield PlanError(
                "A module has one way of recomputing for all its stages where there are several modules.",
                where=f"--fix {key}",
                seen=",".join(value),
                allowed="none, selective or full",
            )
        elif own == "placement" and not isinstance(value, str):
            yield PlanError(
                "A module lies on devices of its own, or shares those of the largest one, on every lane or in line.",
                where=f"--fix {key}",
                seen=",".join(map(str, value)),
                allowed="disjoint, shared or inline",
            )
        elif own == "microbatches" and job.batch % value:
            yield PlanError(
                "The batch cannot be cut into this many equal microbatches.",
                where="--fix microbatches",
                seen=f"batch {job.batch}, microbatches {value}",
                allowed="a divisor of the batch",
            )
        elif own == "multiple" and ("microbatches" in pins and pins["microbatches"] % value):
            yield PlanError(
                "The microbatches are no multiple of what a module takes together.",
                where=f"--fix {key}",
                seen=f"{value} of {pins['microbatches']} microbatches",
                allowed="a divisor of the count of microbatches",
            )
        elif own == "multiple" and value > 1 and len(pins.get(f"{module}.shards", (1,))) > 1:
            yield PlanError(
                "A module that takes several microbatches together is not sharded.",
                where=f"--fix {key}",
                seen=f"{value}, {len(pins[f'{module}.shards'])} shards",
                next_step=f"--fix {module}.shards=1: its replicas divide what it takes among them",
            )
        elif own == "schedule" and FAMILIES[value].placement(4) != linear_placement(4):
            yield PlanError(
                "Several modules are planned with a stage a lane, which this schedule is not made for.",
                where="--fix schedule",
                seen=value,
                allowed=", ".join(
                    name for name in sorted(FAMILIES) if FAMILIES[name].placement(4) == linear_placement(4)
                ),
            )


def _divide_problems(model: Model, pins: Mapping[str, Any], samples: SampledBatches) -> Iterator[PlanError]:
    for module in model.modules:
        if pins.get(f"{module.name}.divide") == "images" and not samples.images_per_sample(module.space):
            packed = [one.name for one in model.modules if one.space != "samples"]
            yield PlanError(
                "The images of this module's samples cannot be divided among its replicas.",
                where=f"--fix {module.name}.divide",
                seen="it works on whole sequences" if module.space == "samples" else samples.note,
                allowed=f"images for {' and '.join(packed)}, with the data known" if packed else "samples",
                next_step="plan with the data: pipefit plan --data INDEX" if module.name in packed else "drop it",
            )


def _device_problems(names: Sequence[str], pins: Mapping[str, Any], devices: int) -> Iterator[PlanError]:
    """Pins that need more devices than there are: one module by itself, or those that cannot share together."""
    if pins.get("devices", 0) > devices:
        yield PlanError(
            "The cluster does not have so many devices.",
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
    most = min(devices, pins.get("devices", devices))
    for together in (apart, *([name] for name in names)):
        if sum(need[name] for name in together) > most:
            keys = [f"{name}.{key}" for name in together for key in (*SIZE, "devices") if f"{name}.{key}" in pins]
            each = " + ".join(f"{need[name]} for {name}" for name in together)
            fewer = "fewer replicas, stages, shards or devices of a module"
            yield PlanError(
                "The modules need more devices than there are.",
                where=f"--fix {', '.join(keys or ['modules'])}",
                seen=f"{each} = {sum(need[name] for name in together)}" if len(together) > 1 else each,
                allowed=f"{most} devices",
                next_step=f"{fewer}, or let modules share devices: without disjoint, stages and devices of their own"
                if len(together) > 1
                else fewer,
            )


def _least_devices(name: str, pins: Mapping[str, Any]) -> int:
    """What a module has at least, where nothing else is pinned one of each."""
    sizes = (pins.get(f"{name}.{key}", 1) for key in SIZE)
    grid = math.prod(one if isinstance(one, int) else len(one) for one in sizes)
    return max(grid, int(pins.get(f"{name}.devices", 1)))


def sharing_choices(pins: Mapping[str, Any], names: Sequence[str], able: Collection[str]) -> list[frozenset[str]]:
    """The choices of modules that share the devices of the largest one: all that the pins leave of those that are
    `able` to. Raises PlanError where a pin cannot be obeyed."""
    asked = {name: pins.get(f"{name}.placement", pins.get("modules")) for name in names}
    choices = []
    for name in names:
        pinned = [f"{name}.{key}" for key in APART if f"{name}.{key}" in pins]
        together = f"{name}.multiple" in pins
        explicit = pins.get(f"{name}.placement") == "shared" or together
        if together and asked[name] not in (None, "shared"):
            raise PlanError(
                "Only a module that shares devices takes several microbatches together.",
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
                next_step="modules at an end of the chain, beside the one with most work, can share its devices",
            )
        if explicit and pinned:
            raise PlanError(
                "A module that shares devices lies whole on every lane: it has no stages or devices of its own.",
                where=f"--fix {name}.placement",
                seen=f"shared, with {', '.join(pinned)}",
                next_step=f"drop --fix {pinned[0]}, or fix {name}.placement=disjoint",
            )
        if name in able and not pinned and asked[name] != "disjoint":
            choices.append(((name,),) if explicit or asked[name] == "shared" else ((), (name,)))
    if pins.get("modules") == "shared" and not choices:
        raise PlanError(
            "No module can share the devices of another, as it is asked for.",
            where="--fix modules",
            seen="shared",
            allowed="disjoint"
            if not able
            else f"shared, for {', '.join(sorted(able))} without pins of their own devices",
            next_step="modules at an end of the chain, beside the one with most work, can share its devices",
        )
    return [frozenset(itertools.chain.from_iterable(one)) for one in itertools.product(*choices)]


def allows_inline(pins: Mapping[str, Any], names: Sequence[str], able: Collection[str]) -> bool:
    """Whether the pins leave it to lay the `able` modules in line with the largest one, all of them on its first or
    last lane: where no module lies elsewhere, or is pinned to be otherwise. Raises PlanError where it is asked for and
    cannot be."""
    asked = [key for key, value in pins.items() if value == "inline"]
    beside = [name for name in asked if name.endswith(".placement") and name.rpartition(".")[0] not in able]
    if beside or (asked and len(able) < len(names) - 1):
        raise PlanError(
            "This cannot lie in line with the largest module.",
            where=f"--fix {(beside or asked)[0]}",
            seen="inline",
            allowed=f"inline for {' and '.join(sorted(able))}" if beside and able else "disjoint or shared",
            next_step="every other module has to stand beside the one with most work, at an end of the chain",
        )
    others = (*APART, "multiple")
    kept = [f"{name}.{key}" for name in names if name in able for key in others if f"{name}.{key}" in pins]
    kept += [f"{name}.placement" for name in able if pins.get(f"{name}.placement", "inline") != "inline"]
    kept += ["modules"] if pins.get("modules", "inline") != "inline" else []
    backbone = next((name for name in names if name not in able), "")
    for name in able:
        kept += _other_devices(pins, name, backbone)
    if asked and kept:
        raise PlanError(
            "Modules in line with the largest one lie on its devices, all of them together.",
            where=f"--fix {asked[0]}",
            seen=f"inline, with {', '.join(kept)}",
            allowed="shards that divide those of the largest, and so many times more replicas",
            next_step=f"drop --fix {kept[0]}, or --fix {asked[0]}=disjoint",
        )
    return len(able) > 0 and len(able) == len(names) - 1 and not kept


def _other_devices(pins: Mapping[str, Any], name: str, backbone: str) -> list[str]:
    """The pins by which the module and the backbone cannot lie on the same devices of a lane."""
    found, size = [], {}
    for key in ("replicas", "shards"):
        for module in (name, backbone):
            if f"{module}.{key}" in pins:
                size[module, key] = len(pins[f"{module}.{key}"])
    for key, many, few in (("replicas", name, backbone), ("shards", backbone, name)):
        if (many, key) in size and (few, key) in size and size[many, key] % size[few, key]:
            found += [f"{name}.{key}", f"{backbone}.{key}"]
    if not found and len(size) == 4:
        devices = {module: size[module, "replicas"] * size[module, "shards"] for module in (name, backbone)}
        found += [f"{name}.replicas", f"{backbone}.replicas"] if len({*devices.values()}) > 1 else []
    return found
