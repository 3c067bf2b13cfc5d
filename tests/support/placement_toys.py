"""Clusters with unlike links, and candidates on them, for the tests of the placement search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.cluster.types import Rail
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable, Ints
from pipefit.cost.work import PipelineWork
from pipefit.plan.assemble.order import computed_schedule
from pipefit.plan.assemble.pipeline_work import pipeline_work
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.placement.shape import PlacementProblem, build_problem
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule.actions import Schedule
from pipefit.simulate import Timeline, simulate_schedule


def skewed_rail(hosts: int, seed: int, name: str = "network", shared: bool = True) -> Rail:
    """Around 100 MB/s and 20 us, lognormal, not symmetric, one host in five slow."""
    random = np.random.default_rng(seed)
    bandwidth = 1e8 * np.exp(random.normal(0.0, 0.4, (hosts, hosts)))
    slow = np.where(random.random(hosts) < 0.2, 0.3, 1.0)
    bandwidth *= np.minimum(slow[:, None], slow[None, :])
    latency = 2e-5 * np.exp(random.normal(0.0, 0.3, (hosts, hosts)))
    np.fill_diagonal(latency, 0.0)
    return Rail(
        name=name,
        latency_s=tuple(map(tuple, latency.tolist())),
        bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist())),
        shared_ports=shared,
    )


def skewed_cluster(hosts: int, devices: int = 1, *, seed: int = 0, rails: int = 1, shared: bool = True) -> Cluster:
    cluster = plain_spec(f"{hosts}x{devices}xA100-80:1GB/s")
    return replace(cluster, rails=tuple(skewed_rail(hosts, seed + i, f"rail{i}", shared) for i in range(rails)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate with everything that was worked out about it."""

    context: PlannerContext
    job: Job
    decisions: ParallelConfig
    work: PipelineWork
    costs: CostTable
    timeline: Timeline
    question: PlacementProblem

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    def costs_of(self, device: Ints) -> CostTable:
        """The real cost table of another placement."""
        chosen = tuple(device[: self.question.shape.slots].tolist())
        parts = self.context.make_skeleton(self.job, replace(self.decisions, devices=chosen))
        return cost_table(pipeline_work(parts, self.context.programs), self.context.network, self.context.layers)

    def permutations(self, count: int, seed: int = 0) -> list[Ints]:
        random = np.random.default_rng(seed)
        return [random.permutation(self.question.devices) for _ in range(count)]


def candidate(
    cluster: Cluster, decisions: ParallelConfig, *, batch: int = 48, layers: int = 9, tied: bool = False
) -> Candidate:
    context = PlannerContext(toy_model(layers, tied=tied), cluster)
    job = Job(batch=batch, sequence=128)
    cut = context.layer_cutter.cut_layers(job, decisions)
    assert cut is not None
    decisions = replace(decisions, cuts=cut.cuts)
    parts = context.make_skeleton(job, decisions)
    work = pipeline_work(parts, context.programs)
    costs = cost_table(work, context.network, context.layers)
    computed = computed_schedule(decisions.schedule, parts, costs)
    timeline = simulate_schedule(context.lower_order(parts, decisions, computed, costs), costs)
    question = build_problem(work, context.network, context.layers, timeline)
    return Candidate(context, job, decisions, work, costs, timeline, question)
