"""What `pipefit verify` measured as facts that a memory correction is learned from (`cost/memory/correction.py`)."""

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
    """One for every rank that was measured on `device` (`cpu` or `cuda`) of a machine with this fingerprint. Raises
    RunError as `check_recordable` does."""
    check_recordable(plan, cluster, [one.rank for one in found], device, environment.get("device", ""))
    network, simulation = Network(cluster), simulate_plan(plan, model, cluster)
    when = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    runs = []
    for one in found:
        if one.measured is not None:
            runs.append(
                MemoryRun(
                    configuration=run_configuration(plan),
                    kind=network.kinds[one.device].name,
                    devices=len(plan.used_devices),
                    rank=one.rank,
                    parts=peak_parts(simulation, network.kinds[one.device].name)[one.lane],
                    measured_bytes=float(one.measured.largest_bytes),
                    when=when,
                    environment=environment,
                )
            )
    return runs


def check_recordable(plan: Plan, cluster: Cluster, ranks: Sequence[int], device: str, name: str) -> None:
    """Raises RunError where the plan is for other devices than this one (`check_kind`), since memory on a CPU says
    nothing about a GPU; and for a rank with less to do than the one of its lane that the analytic parts are for."""
    network = Network(cluster)
    for rank in ranks:
        check_kind(network.kinds[plan.used_devices[rank]].name, device, name)
        if not is_fullest(plan, plan.used_devices[rank]):
            lane = device_lane(plan, plan.used_devices[rank])
            others = [other for other in plan.lane_mesh(lane).devices if is_fullest(plan, other)]
            raise RunError(
                f"What rank {rank} takes cannot be recorded: others of its lane and kind have more rows or a larger "
                "shard, and the prediction is for those.",
                where="--record",
                seen=f"--rank {rank}",
                allowed=f"of lane {lane}: {', '.join(str(plan.used_devices.index(other)) for other in others)}",
                next_step="name one of these ranks, or leave --record out",
            )


LATER = {"recipes": "", "turn": 0, "turns": 1, "divide": "samples"}
"""Fields of stages that came later, as all plans had them before."""


def run_configuration(plan: Plan) -> str:
    """The same for plans that run the same: whatever was predicted of them, and whatever they are called. What plans
    did not say when the first were recorded, and do not have, is left out."""
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
    """Raises RunError where a kind of device is not the one that was measured on (`name`: of the GPU)."""
    words = kind.lower().split("-")
    if device == "cpu" and words[0] == "cpu":
        return
    if device == "cuda" and words[0] != "cpu" and all(word in name.lower() for word in words if not word.isdigit()):
        return
    raise RunError(
        "What was measured here cannot be recorded for the plan's devices.",
        where="--record",
        seen="a CPU" if device == "cpu" else f"a GPU, {name or 'of an unknown name'}",
        allowed=f"a device of kind {kind}",
        next_step="run `pipefit verify` on such a device, or leave --record out",
    )
