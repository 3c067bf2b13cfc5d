"""The shard axis of the search space: how many devices split each layer, and by which program.

The axis is free unless it is constrained. Its sizes fill every host with groups of adjacent devices, because a layer
that is split between hosts sends every hidden state over their links. `--fix shards=N` reaches every other size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from pipefit.errors import PlanError
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import Sharding
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.plan.request.sliceable import check_slices
from pipefit.plan.types import Job

FIXED_PROGRAMS: tuple[Sharding, ...] = ("megatron-sp", "megatron")
"""Programs that are written for any layer, without a search."""


def shard_constraints(job: Job, constraints: Constraints, cutter: LayerCutter | None) -> Iterator[Constraints]:
    """Yield the constraints once for every choice of the shard axis that they leave open, with that choice fixed.

    Without a cutter the only free choice is a single shard.
    """
    shards, sharding = constraints.shards, constraints.sharding
    if shards is not None:
        style: Sharding = "none" if len(shards) == 1 else sharding or FIXED_PROGRAMS[0]
        yield replace(constraints, sharding=style)
        return
    if sharding in (None, "none"):
        yield replace(constraints, shards=(1,), sharding="none")
    styles = [style for style in FIXED_PROGRAMS if sharding in (None, style)]
    for size in shard_sizes(constraints, cutter):
        for style in styles:
            fixed = replace(constraints, shards=(1,) * size, sharding=style)
            if cutter is not None and _has_programs(job, fixed, cutter):
                yield fixed


def shard_sizes(constraints: Constraints, cutter: LayerCutter | None) -> list[int]:
    """Return the sizes of the shard axis above one that a search tries: divisors of the devices of every host."""
    if constraints.shards is not None:
        return [len(constraints.shards)] if len(constraints.shards) > 1 else []
    searched = constraints.mapping in (None, "search", "hostname") and constraints.sharding != "none"
    if cutter is None or not searched or fixed_length(cutter.programs.model) is not None:
        return []
    common = gcd(*(host.devices for host in cutter.network.cluster.hosts))
    return [size for size in range(2, common + 1) if cutter.fleet.fills_hosts(size)]


def _has_programs(job: Job, constraints: Constraints, cutter: LayerCutter) -> bool:
    """Return whether every layer can be split by the fixed program, evenly."""
    shares, style = constraints.shards or (1,), constraints.sharding or "none"
    slices = constraints.slices if isinstance(constraints.slices, tuple) else ()
    try:
        check_slices(slices, job.sequence, shares, style)
        programs = [
            cutter.programs.layer_program(layer, style, shares)
            for layer in cutter.programs.modules[cutter.module].layers
        ]
    except PlanError:
        return False
    return all(program.shares in ((), shares) for program in programs)
