"""Records of memory measured by `pipefit verify`, from which a memory correction is learned
(`cost/memory/correction.py`)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from pipefit.cluster.types import Cluster
from pipefit.codec import content_digest, to_data
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.correction import MemoryRun
from pipefit.errors import RunError
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.risk import peak_parts
from pipefit.plan.types import Plan
from pipefit.run.verify.verify import RankMemory, is_fullest
from pipefit.run.worker.worker import device_lane


def memory_runs(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    found: Sequence[RankMemory],
    device: str,
    environment: Mapping[str, str],
) -> list[MemoryRun]:
    """Return one record for every rank measured on `device` (`cpu` or `cuda`) of a machine with this fingerprint.
    Raises RunError as `check_recordable` does."""
    check_recordable(plan, cluster, [rank_memory.rank for rank_memory in found], device, environment.get("device", ""))
    network, simulation = Network(cluster), simulate_plan(plan, model, cluster)
    when = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    runs = []
    for rank_memory in found:
        if rank_memory.measured is not None:
            runs.append(
                MemoryRun(
                    configuration=run_configuration(plan),
                    kind=network.kinds[rank_memory.device].name,
                    devices=len(plan.used_devices),
                    rank=rank_memory.rank,
                    parts=peak_parts(simulation, network.kinds[rank_memory.device].name)[rank_memory.lane],
                    measured_bytes=float(rank_memory.measured.largest_bytes),
                    when=when,
                    environment=environment,
                )
            )
    return runs


def check_recordable(plan: Plan, cluster: Cluster, ranks: Sequence[int], device: str, name: str) -> None:
    """Raise RunError if the plan is for other devices than this one (`check_kind`): memory on a CPU says nothing about
    a GPU. Also raise it for a rank with less work than the rank of its lane that the analytic parts describe."""
    network = Network(cluster)
    for rank in ranks:
        check_kind(network.kinds[plan.used_devices[rank]].name, device, name)
        if not is_fullest(plan, plan.used_devices[rank]):
            lane = device_lane(plan, plan.used_devices[rank])
            fullest = [d for d in plan.lane_mesh(lane).devices if is_fullest(plan, d)]
            raise RunError(
                f"The memory of rank {rank} cannot be recorded: other ranks of its lane and kind have more rows or a "
                "larger shard, and the prediction is for those.",
                where="--record",
                seen=f"--rank {rank}",
                allowed=f"of lane {lane}: {', '.join(str(plan.used_devices.index(d)) for d in fullest)}",
                next_step="name one of these ranks, or leave --record out",
            )


LATER = {"recipes": "", "turn": 0, "turns": 1, "divide": "samples"}
"""Stage fields added later, with the value that all earlier plans had."""


def run_configuration(plan: Plan) -> str:
    """Return a digest that is equal for plans with the same execution, regardless of prediction and name. Fields added
    after the first records are left out at their default values."""
    job, stages = to_data(plan.job), [to_data(stage) for stage in plan.stages]
    if plan.job.documents == "joined":
        del job["documents"]
    for stage in stages:
        for name, value in LATER.items():
            if stage[name] == value:
                del stage[name]
    return content_digest(
        {
            "job": job,
            "model": plan.model.config,
            "groups": plan.groups,
            "stages": stages,
            "parameters": plan.parameters,
            "order": plan.order,
        }
    )


def check_kind(kind: str, device: str, name: str) -> None:
    """Raise RunError if a kind of device is not the measured one (`name`: of the GPU)."""
    words = kind.lower().split("-")
    if device == "cpu" and words[0] == "cpu":
        return
    if device == "cuda" and words[0] != "cpu" and all(word in name.lower() for word in words if not word.isdigit()):
        return
    raise RunError(
        "Memory measured on this machine cannot be recorded for the plan's devices.",
        where="--record",
        seen="a CPU" if device == "cpu" else f"a GPU, {name or 'of an unknown name'}",
        allowed=f"a device of kind {kind}",
        next_step="run `pipefit verify` on such a device, or leave --record out",
    )
