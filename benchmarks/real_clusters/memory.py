"""The memory part of compare.py: what devices hold is learned from small plans, as `pipefit verify --record` does
it, and what plans really held is compared with the limits of the cluster.

Nothing in a lab runs out of memory by itself: its processes share the machine's. What a rank had alive at its worst
moment is counted by the CPU allocator's own record, and a plan fits where that is within its device's limit, on every
rank.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.lab.runs import Measured
from benchmarks.predictions.contention import laid
from pipefit.cluster import Cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.correction import MemoryRun
from pipefit.cost.memory.correction_file import MemoryFacts, learn_facts
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.risk import attach_risk, peak_parts
from pipefit.plan.types import Job, Plan
from pipefit.run.verify.record import run_configuration
from pipefit.run.verify.verify import critical_ranks, measure_rank
from pipefit.run.worker.worker import device_lane

SCARCE_BYTES = 1 << 28
"""Devices with less are planned for with a correction: without one the planner leaves 64 MiB for libraries."""

SMALL = (
    (laid(1, 1, 2), 4), (laid(1, 1, 4), 4), (laid(2, 1, 4), 8), (laid(4, 1, 4), 8), (laid(4, 1, 8), 8),
    (laid(4, 1, 8, "zb-h1"), 8), (laid(4, 1, 8, "zb-h2"), 16), (laid(2, 2, 4), 8), (laid(1, 2, 2), 8),
    (laid(4, 1, 4, recompute=("full",)), 8), (laid(2, 1, 4, recompute=("selective",)), 8),
    (laid(1, 4, 1), 4), (laid(2, 1, 8, recompute=("full",)), 16),
)  # fmt: skip
"""Plans of up to 4 devices that are learned from, and their batches."""


def scarce(cluster: Cluster) -> bool:
    """Whether some kind of device has so little memory that plans may not fit."""
    return any(kind.memory_bytes < SCARCE_BYTES for kind in cluster.kinds.values())


def learned(cluster: Cluster, model: Model, sequence: int = 64) -> MemoryFacts:
    """A correction for every kind of device. All of them are the processor of this machine, so one is measured."""
    runs: list[MemoryRun] = []
    for decisions, batch in SMALL:
        plan = build_plan(model, cluster, Job(batch=batch, sequence=sequence, precision="float32"), decisions)
        simulation = simulate_plan(plan, model, cluster)
        plan, parts = add_prediction(plan, model, simulation), peak_parts(simulation)
        for rank in critical_ranks(plan, 2):
            measured = measure_rank(plan, model, rank, torch.device("cpu"), 1).largest_bytes
            gc.collect()
            runs += [
                MemoryRun(
                    configuration=run_configuration(plan),
                    kind=kind,
                    devices=len(plan.used_devices),
                    rank=rank,
                    parts=parts[device_lane(plan, plan.used_devices[rank])],
                    measured_bytes=float(measured),
                )
                for kind in cluster.kinds
            ]
    return learn_facts(runs)


def risk_of(plan: Plan, model: Model, cluster: Cluster, facts: MemoryFacts) -> float:
    """The probability that a plan does not fit."""
    prediction = attach_risk(plan, model, cluster, facts).prediction
    assert prediction is not None and prediction.risk is not None
    return prediction.risk


def held(plan: Plan, run: Measured, cluster: Cluster) -> dict[str, Any]:
    """What the fullest rank of every kind of device had alive, beside the limit; and whether all ranks fit. Empty where
    nothing was counted."""
    if not run.peak_bytes:
        return {}
    network = Network(cluster)
    kinds: dict[str, int] = {}
    for device, size in zip(plan.used_devices, run.peak_bytes, strict=True):
        name = network.kinds[device].name
        kinds[name] = max(kinds.get(name, 0), size)
    limits = {name: cluster.kinds[name].memory_bytes for name in kinds}
    return {"peak_bytes": kinds, "limit_bytes": limits, "fits": fits(kinds, limits)}


def fits(peaks: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    """Whether no kind of device holds more than it may."""
    return all(size <= limits[name] for name, size in peaks.items())
