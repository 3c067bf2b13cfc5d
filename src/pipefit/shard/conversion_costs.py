"""Prices of all conversions of a value on the devices of a setting, forward and backward, with the bytes held."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from pipefit.cost.comm.lowerings import LoweredCollective
from pipefit.cost.compute.shard_exchanges import BACKWARD_COLLECTIVE
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.model.graph import Shape, element_count
from pipefit.shard import frontier
from pipefit.shard.setting import ShardSetting
from pipefit.shard.template import WHOLE_CUT, ConversionCost, Line

ConversionCosts = Mapping[tuple[int, int], ConversionCost]
"""(source form, target form) -> the price of the conversion."""

Cuts = Sequence[int | None]
"""The units of every dimension; None if it cannot be split."""


def price_conversions(
    setting: ShardSetting, shape: Shape, cuts: Cuts, kept_bytes: float, activation: bool
) -> ConversionCosts:
    """Return the prices of all conversions of a value of which `kept_bytes` stay.

    A value that is not an activation is only sliced.
    """
    able = {dim: cut for dim, cut in enumerate(cuts) if cut is not None}
    size = float(element_count(shape, setting.symbol_sizes) * COMPUTE_BYTES[setting.precision])
    slow = max(2 * size / kind.memory_bandwidth_bytes_per_s + 2 * kind.overhead_s for kind in setting.kinds)
    conversions: dict[tuple[int, int], ConversionCost] = {}
    for dim, cut in able.items():
        along = frontier.form_number_along(dim)
        conversions[frontier.REPLICATED, along] = ConversionCost((slow, 0.0), cut, meets=False, held=(0.0, kept_bytes))
        if activation:
            conversions[along, frontier.REPLICATED] = _price_collective(
                setting, "all_gather", size, cut, (kept_bytes, 0.0)
            )
            conversions[frontier.PARTIAL, along] = _price_collective(
                setting, "reduce_scatter", size, cut, (0.0, kept_bytes)
            )
    if activation and setting.lowered is not None:
        for (old, earlier), (new, cut) in itertools.permutations(able.items(), 2):
            conversion = _price_collective(setting, "all_to_all", size, cut, (0.0, kept_bytes), earlier)
            conversions[frontier.form_number_along(old), frontier.form_number_along(new)] = conversion
    if activation:
        seconds = _round_trip_s(setting, "all_reduce", size)
        conversions[frontier.PARTIAL, frontier.REPLICATED] = ConversionCost((seconds, 0.0), held=(kept_bytes, 0.0))
    return conversions


def price_unshardings(setting: ShardSetting, shape: Shape, cuts: Cuts, trainable: bool, often: int) -> ConversionCosts:
    """Return the prices of gathering a sharded parameter and reducing its gradient.

    `often` is the number of gathers per microbatch; 0: the gathered parameter is kept.
    """
    elements = float(element_count(shape, {}))
    times = {"all_gather": max(1, often), "reduce_scatter": int(trainable)}
    size = elements * COMPUTE_BYTES[setting.precision]
    sizes = {"all_gather": size, "reduce_scatter": elements * GRADIENT_BYTES[setting.precision] if often else size}
    lowered = setting.lowered

    def unsharding_s(padding: float) -> float:
        return fsum(times[kind] * setting.collective(kind, padding * sizes[kind]) for kind in sizes)

    def lowered_options(kind: str) -> tuple[LoweredCollective, ...]:
        lowerings = lowered(kind, sizes[kind]) if lowered else ()
        return tuple(
            replace(lowering, constant_s=times[kind] * lowering.constant_s, slope=times[kind] * lowering.slope)
            for lowering in lowerings
        )

    line = (0.0, 0.0) if lowered else (2 * unsharding_s(1.0) - unsharding_s(2.0), unsharding_s(2.0) - unsharding_s(1.0))
    ahead, back = lowered_options("all_gather"), lowered_options("reduce_scatter")
    return {
        (frontier.form_number_along(dim), frontier.REPLICATED): ConversionCost(
            line, cut, passing=max(sizes.values()), ahead=ahead, back=back
        )
        for dim, cut in enumerate(cuts)
        if cut is not None
    }


def _price_collective(
    setting: ShardSetting, kind: str, size: float, cut: int, held: Line, earlier: int = WHOLE_CUT
) -> ConversionCost:
    """Return the price of a collective of parts, with all its lowerings."""
    if setting.lowered is None:
        once_s, twice_s = _round_trip_s(setting, kind, size), _round_trip_s(setting, kind, 2 * size)
        # padded: a line in n x the largest fraction
        return ConversionCost((2 * once_s - twice_s, twice_s - once_s), cut, held=held)
    ahead, back = setting.lowered(kind, size), setting.lowered(BACKWARD_COLLECTIVE[kind], size)
    return ConversionCost((0.0, 0.0), cut, held=held, ahead=ahead, back=back, earlier=earlier)


def _round_trip_s(setting: ShardSetting, kind: str, size: float) -> float:
    return setting.collective(kind, size) + setting.collective(BACKWARD_COLLECTIVE[kind], size)
