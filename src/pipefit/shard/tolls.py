"""What every conversion of a value takes on the devices of a setting, forward and backward, and what it leaves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipefit.cost.comm.lowerings import Lowered
from pipefit.cost.compute.shard_exchanges import BACKWARD
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.model.graph import Shape, element_count
from pipefit.shard import frontier
from pipefit.shard.setting import Setting
from pipefit.shard.template import WHOLE_CUT, Line, Toll

Tolls = Mapping[tuple[int, int], Toll]
"""(from form, to form) -> its price."""

Cuts = Sequence[int | None]
"""The units of every dimension; None where it cannot be split."""


def conversions(setting: Setting, shape: Shape, cuts: Cuts, kept_bytes: float, activation: bool) -> Tolls:
    """Every conversion of a value of which so many bytes stay; of what is no activation, only slices."""
    able = {dim: cut for dim, cut in enumerate(cuts) if cut is not None}
    size = float(element_count(shape, setting.symbols) * COMPUTE_BYTES[setting.precision])
    slow = max(2 * size / kind.memory_bandwidth_bytes_per_s + 2 * kind.overhead_s for kind in setting.kinds)
    found: dict[tuple[int, int], Toll] = {}
    for dim, cut in able.items():
        along = frontier.split_along(dim)
        found[frontier.WHOLE, along] = Toll((slow, 0.0), cut, meets=False, held=(0.0, kept_bytes))
        if activation:
            found[along, frontier.WHOLE] = _moving(setting, "all_gather", size, cut, (kept_bytes, 0.0))
            found[frontier.PARTIAL, along] = _moving(setting, "reduce_scatter", size, cut, (0.0, kept_bytes))
    if activation and setting.lowered is not None:
        for (old, earlier), (new, cut) in itertools.permutations(able.items(), 2):
            toll = _moving(setting, "all_to_all", size, cut, (0.0, kept_bytes), earlier)
            found[frontier.split_along(old), frontier.split_along(new)] = toll
    if activation:
        seconds = _there_and_back(setting, "all_reduce", size)
        found[frontier.PARTIAL, frontier.WHOLE] = Toll((seconds, 0.0), held=(kept_bytes, 0.0))
    return found


def unshardings(setting: Setting, shape: Shape, cuts: Cuts, trainable: bool, often: int) -> Tolls:
    """Gathering a parameter that is stored split, so `often` a microbatch (0: all of it stays), and reducing its
    gradient."""
    elements = float(element_count(shape, {}))
    times = {"all_gather": max(1, often), "reduce_scatter": int(trainable)}
    size = elements * COMPUTE_BYTES[setting.precision]
    sizes = {"all_gather": size, "reduce_scatter": elements * GRADIENT_BYTES[setting.precision] if often else size}
    lowered = setting.lowered

    def seconds(padding: float) -> float:
        return sum(times[kind] * setting.collective(kind, padding * sizes[kind]) for kind in sizes)

    def ways(kind: str) -> tuple[Lowered, ...]:
        found = lowered(kind, sizes[kind]) if lowered else ()
        return tuple(
            replace(one, constant_s=times[kind] * one.constant_s, slope=times[kind] * one.slope) for one in found
        )

    line = (0.0, 0.0) if lowered else (2 * seconds(1.0) - seconds(2.0), seconds(2.0) - seconds(1.0))
    ahead, back = ways("all_gather"), ways("reduce_scatter")
    return {
        (frontier.split_along(dim), frontier.WHOLE): Toll(
            line, cut, passing=max(sizes.values()), ahead=ahead, back=back
        )
        for dim, cut in enumerate(cuts)
        if cut is not None
    }


def _moving(setting: Setting, kind: str, size: float, cut: int, held: Line, earlier: int = WHOLE_CUT) -> Toll:
    """A collective of parts, with the lowerings from which the cheapest is taken."""
    if setting.lowered is None:
        one, two = _there_and_back(setting, kind, size), _there_and_back(setting, kind, 2 * size)
        return Toll((2 * one - two, two - one), cut, held=held)  # padded: a line in n x the largest fraction
    ahead, back = setting.lowered(kind, size), setting.lowered(BACKWARD[kind], size)
    return Toll((0.0, 0.0), cut, held=held, ahead=ahead, back=back, earlier=earlier)


def _there_and_back(setting: Setting, kind: str, size: float) -> float:
    return setting.collective(kind, size) + setting.collective(BACKWARD[kind], size)
