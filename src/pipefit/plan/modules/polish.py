"""Local search around a good layout.

One change moves the end of a stage by a layer, toggles recomputation of a module, refines an inline grid by one step,
doubles or halves the microbatches a module on shared devices processes together, toggles division by images or samples,
or toggles sharded optimizer state.

The short list comes from a closed form that knows neither the order of actions nor the exact peak memory of a device.
So the best layouts are changed one thing at a time, as long as the simulator finds them faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from pipefit.optimizers.sharded_state import STATES_UP_TO_ZERO_1
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.modules.costing import CostedModule
from pipefit.plan.modules.module_budgets import MODULE_SEARCH_BUDGET
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig


def polish_plan(start: EvaluatedPlan, around: Callable[[EvaluatedPlan], Sequence[EvaluatedPlan]]) -> EvaluatedPlan:
    """Return the plan reached from `start` by moving to the fastest of `around` while that is faster."""
    best = start
    for _ in range(MODULE_SEARCH_BUDGET.polishing_rounds):
        faster = min(around(best), key=lambda one: one.rank_key, default=best)
        if faster.rank_key[0] >= best.rank_key[0]:
            break
        best = faster
    return best


def neighbour_layouts(
    decisions: MultiModuleConfig,
    costed: Sequence[CostedModule],
    samples: int,
    images: Mapping[str, float],
    constraints: Constraints,
) -> Iterator[MultiModuleConfig]:
    """Yield every layout that differs in one thing; constraints are kept.

    A microbatch has `samples` samples, and a sample has `images` of each module that can divide them.
    """
    if constraints.sharded_state is None:
        for state in STATES_UP_TO_ZERO_1:
            if state != decisions.sharded_state:
                modules = tuple((name, replace(config, sharded_state=state)) for name, config in decisions.modules)
                yield replace(decisions, sharded_state=state, modules=modules)
    for index, (name, config) in enumerate(decisions.modules):
        layers = len(costed[index].profile.ways[0].sample_s)
        fixed = constraints.of_module(name)
        free = fixed.shards is None and fixed.replicas is None
        for changed in (*_cut_elsewhere(config, layers), *_toggle_recompute(config, fixed.recompute is not None)):
            yield from _run_as(decisions, costed, index, changed)
        yield from _redivided_layouts(decisions, costed, index, samples, images, constraints)
        if name in decisions.guests and costed[index].ways[0].load.space != "samples" and fixed.multiple is None:
            pieces = samples * (images[name] if name in decisions.divided else 1.0)
            for multiple, changed in _guest_multiples(decisions, name, config, pieces):
                if changed == config or free:
                    multiples = {**dict(decisions.multiples), name: multiple}
                    remade = _with_module(decisions, index, changed)
                    yield replace(
                        remade,
                        multiples=tuple((guest, count) for guest, count in multiples.items() if count > 1),
                    )


def _redivided_layouts(
    decisions: MultiModuleConfig,
    costed: Sequence[CostedModule],
    index: int,
    samples: int,
    images: Mapping[str, float],
    constraints: Constraints,
) -> Iterator[MultiModuleConfig]:
    """Yield layouts in which a module divides its samples or images otherwise, or over another grid of devices."""
    name, config = decisions.modules[index]
    fixed = constraints.of_module(name)
    devices = len(config.replicas) * len(config.shards)
    able = images.get(name, 0.0) if devices <= MODULE_SEARCH_BUDGET.divided_devices else 0.0
    multiple = decisions.multiple_of(name)
    for divided in _division_choices(name in decisions.divided, able, fixed.divide is not None):
        redivided = _with_division(decisions, name, divided)
        pieces = samples * multiple * (images[name] if divided else 1.0)
        if redivided != decisions and 1 < len(config.replicas) <= pieces:
            yield redivided
        free = fixed.shards is None and fixed.replicas is None
        if free and name in (decisions.inline if not divided else (*decisions.inline, *decisions.guests)):
            backbone_shards = len(dict(decisions.modules)[decisions.backbone].shards)
            for changed in _change_grid(config, backbone_shards if multiple == 1 else 1, pieces):
                yield from _run_as(redivided, costed, index, changed)


def _run_as(
    decisions: MultiModuleConfig, costed: Sequence[CostedModule], place: int, own: ParallelConfig
) -> Iterator[MultiModuleConfig]:
    """Yield the decisions with this config of a module, if the module has such a variant."""
    variant = next((candidate for candidate in costed[place].ways if candidate.matches_decisions(own)), None)
    if variant is not None:
        yield _with_module(decisions, place, replace(own, sharding=variant.sharding))


def _division_choices(now: bool, images: float, fixed: bool) -> list[bool]:
    """Return whether images are divided: the present value, and the other one if samples have several images."""
    return [now] if fixed or (images <= 1.0 and not now) else [now, not now]


def _with_division(decisions: MultiModuleConfig, name: str, divided: bool) -> MultiModuleConfig:
    """Return the decisions with the images of a module divided, or its samples."""
    divided_others = [guest for guest in decisions.divided if guest != name]
    return replace(decisions, divided=tuple([*divided_others, name] if divided else divided_others))


def _with_module(decisions: MultiModuleConfig, place: int, own: ParallelConfig) -> MultiModuleConfig:
    """Return the decisions with this config of the module at `place`."""
    entry = (decisions.modules[place][0], own)
    return replace(decisions, modules=(*decisions.modules[:place], entry, *decisions.modules[place + 1 :]))


def _guest_multiples(
    decisions: MultiModuleConfig, name: str, own: ParallelConfig, pieces: float
) -> Iterator[tuple[int, ParallelConfig]]:
    """Yield twice, four times and half as many microbatches for a guest to process together, with its config.

    Several microbatches require a guest without shards, at least one unit for every lane, and one of `pieces` samples
    or images for every replica.
    """
    unsharded = replace(own, replicas=(1,) * (len(own.replicas) * len(own.shards)), shards=(1,), sharding="none")
    now = decisions.multiple_of(name)
    least = max(2 * now, math.ceil(len(unsharded.replicas) / pieces))
    for multiple, config in [(least, unsharded), (2 * least, unsharded), *([(now // 2, own)] if now % 2 == 0 else [])]:
        units, rest = divmod(decisions.microbatches, multiple)
        if not rest and units >= decisions.copy_count(name) and len(config.replicas) <= multiple * pieces:
            yield multiple, config


def _cut_elsewhere(own: ParallelConfig, layers: int) -> Iterator[ParallelConfig]:
    for index, cut in enumerate(own.cuts):
        for moved in (cut - 1, cut + 1):
            cuts = (*own.cuts[:index], moved, *own.cuts[index + 1 :])
            if all(start < stop for start, stop in pairwise((0, *cuts, layers))):
                yield replace(own, cuts=cuts)


def _toggle_recompute(own: ParallelConfig, fixed: bool) -> Iterator[ParallelConfig]:
    if not fixed:
        yield replace(own, recompute=("full",) if own.recompute == ("none",) else ("none",))


def _change_grid(own: ParallelConfig, most: int, pieces: float) -> Iterator[ParallelConfig]:
    """Yield the lane's devices in another grid: half the shards or twice as many.

    Each replica must get at least one of `pieces` samples or images.
    """
    replicas, shards = len(own.replicas), len(own.shards)
    if shards % 2 == 0 and 2 * replicas <= pieces:
        yield replace(own, replicas=(1,) * (2 * replicas), shards=(1,) * (shards // 2))
    if replicas % 2 == 0 and most % (2 * shards) == 0 and replicas // 2 <= pieces:
        yield replace(own, replicas=(1,) * (replicas // 2), shards=(1,) * (2 * shards))
