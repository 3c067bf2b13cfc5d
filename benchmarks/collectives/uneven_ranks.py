"""One rank of `uneven.py`: does every collective of FOLDER/task.json some times; rank 0 writes when each of
them began and ended on each rank.

`python uneven_ranks.py FOLDER`, started on every device of a lab.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipefit.run.session.rendezvous import World
from pipefit.run.sharded.parts import ShardContext, exchange_parts, gather_parts, scatter_sums
from pipefit.run.transfers.comms import CommGroups

UNITS = 48
"""A tensor has so many rows (and for all-to-all so many columns), which the cases cut."""


def main() -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    world = World(torch.device("cpu"))
    world.open_store()
    world.start_group(300.0, 300.0)
    comms = CommGroups(world.device)
    ranks = list(range(world.size))
    comms.create_groups([ranks])
    found = []
    for case in task["cases"]:
        context = ShardContext(group=comms.find_group(ranks), shares=tuple(case["parts"]), position=world.rank)
        call = collective(case, context)
        times = []
        for repeat in range(task["repeats"] + 1):
            dist.barrier()
            start = time.perf_counter()
            call()
            if repeat:
                times.append((start, time.perf_counter()))
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, times)
        found.append(everyone)
    if world.rank == 0:
        (folder / "measured.json").write_text(json.dumps(found), encoding="utf-8")
    world.stop_group()


def collective(case: dict[str, Any], context: ShardContext) -> Callable[[], torch.Tensor]:
    """One case on this rank: `bytes` of the whole tensor, cut by `parts` of `UNITS` along its rows, and for all-to-all
    along its columns afterwards."""
    stops = [0, *itertools.accumulate(case["parts"])]
    runs = list(itertools.pairwise(stops))
    start, stop = runs[context.position]
    whole = torch.zeros(UNITS, UNITS, case["bytes"] // 4 // UNITS**2)
    part, how = whole[start:stop], case["lowering"]
    if case["operation"] == "all_gather":
        return lambda: gather_parts(part, runs, 0, context, how)
    if case["operation"] == "reduce_scatter":
        return lambda: scatter_sums(whole, runs, 0, context, how)
    return lambda: exchange_parts(part, (runs, 0), (runs, 1), context, how)


if __name__ == "__main__":
    main()
