"""Assembling a plan from explicit decisions: deterministic, and the one place that does it.

The search calls it for its winner, tests and tools call it directly, and what a person writes by hand has the same
parts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.codec import digest
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.memory.order_limits import order_limits
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.errors import PlanError
from pipefit.model.graph import Model, Module
from pipefit.plan.assemble.module_parts import module_parameters
from pipefit.plan.assemble.order import computed_schedule, frozen_in, lower_for, order_of
from pipefit.plan.assemble.pipeline_work import Parts, pipeline_work
from pipefit.plan.assemble.shard_programs import Programs
from pipefit.plan.assemble.shard_recipes import Asked, asked_by, searched_recipes
from pipefit.plan.assemble.structure import make_edges, make_groups, make_stages
from pipefit.plan.cutting.cutter import Cutter
from pipefit.plan.cutting.refine import refined_cuts
from pipefit.plan.request.decisions import Decisions, check_decisions
from pipefit.plan.request.sequence_length import check_length
from pipefit.plan.request.sliceable import check_sliceable
from pipefit.plan.types import Hashes, Job, ModelSource, Parameter, Plan, Space
from pipefit.schedule.actions import Schedule
from pipefit.shard.apart import check_apart
from pipefit.simulate import simulate

VERSION = 2


class Workbench:
    """A model and a cluster with everything that is worked out about them once and used for many plans."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        layers: LayerCosts | None = None,
        name: str = "",
        cluster_source: str = "",
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.network = Network(cluster)
        self.programs = Programs(model)
        self.layers: LayerCosts = layers or best_costs(cluster, graphs=model.graphs.values())
        self.source = ModelSource(name=name or model.family, family=model.family, config=model.config)
        self.cluster_source = cluster_source
        self._searched_for: tuple[Job, Asked] | None = None
        self.hashes = Hashes(model=model.hash, cluster=digest(cluster))

    @property
    def module(self) -> Module:
        """The only module. Raises PlanError where there are several."""
        if len(self.model.modules) != 1:
            raise PlanError(
                "Plans of several modules are not searched yet; they can be written by hand.",
                where="model.modules",
                seen=", ".join(module.name for module in self.model.modules),
                next_step="see docs/plan-format.md",
            )
        return self.model.modules[0]

    def parts(self, job: Job, decisions: Decisions) -> Parts:
        """Groups, stages and edges of these decisions; layers are cut by their costs where no cuts are given."""
        module = self.module
        cut = self.cutter.cut(job, decisions)
        cuts = decisions.cuts or (cut or self.cutter.leanest(job, decisions)).cuts
        stages, groups = make_stages(module, decisions, cuts, self.programs), make_groups(decisions)
        zero1 = decisions.zero1 and len(decisions.replicas) > 1
        return Parts(
            job=job,
            groups=groups,
            spaces=(Space(name=module.space, rows=job.batch, tokens=job.sequence),),
            stages=stages,
            edges=make_edges(module, stages, groups, self.programs),
            placement=decisions.lane_of_stage,
            microbatches=decisions.microbatches,
            slices=decisions.slices or (job.sequence,),
            split_state=(zero1,) * len(stages),
        )

    def refined(self, job: Job, decisions: Decisions, parts: Parts) -> Parts:
        """These parts, cut again where it makes the step shorter (`cutting/refine.py`). The decisions give no cuts."""

        def parts_of(cuts: tuple[int, ...]) -> Parts:
            return self.parts(job, replace(decisions, cuts=cuts))

        def costs_of(cuts: tuple[int, ...]) -> CostTable:
            return self.costs(parts_of(cuts))

        def peaks(cuts: tuple[int, ...]) -> list[float]:
            costs = costs_of(cuts)
            return [float(peak) for peak in simulate(self.schedule(parts_of(cuts), decisions, costs), costs).peak_bytes]

        cuts = refined_cuts(self.cutter, job, decisions, parts, costs_of, peaks)
        return parts if cuts == tuple(stage.layers[0] for stage in parts.stages[1:]) else parts_of(cuts)

    def search_recipes(self, job: Job, asked: Asked) -> None:
        """Search the shard programs of the module's layers; from now on `searched` without a name means these."""
        if self._searched_for == (job, asked):
            return
        self._searched_for = (job, asked)
        self.programs = Programs(
            self.model, searched_recipes(self.model, self.module, self.network, self.layers, job, asked)
        )
        self.__dict__.pop("cutter", None)  # it holds the programs that were before

    def on(self, cluster: Cluster) -> Workbench:
        """The same model on another cluster."""
        other = Workbench(self.model, cluster, self.layers, self.source.name)
        other.programs = self.programs
        return other

    @cached_property
    def cutter(self) -> Cutter:
        """Cuts of the only module."""
        return Cutter(self.programs, self.module.name, self.network, self.layers)

    def costs(self, parts: Parts) -> CostTable:
        """The cost table of these parts."""
        return cost_table(pipeline_work(parts, self.programs), self.network, self.layers)

    def parameters(self, parts: Parts, decisions: Decisions) -> tuple[Parameter, ...]:
        """The parameters of these parts."""
        return module_parameters(self.model, parts, self.programs)

    def schedule(self, parts: Parts, decisions: Decisions, costs: CostTable | None) -> Schedule:
        """The order of the decided family for these parts, its transfers put in by the times of `costs`. A family that
        fits to memory gets that of the devices."""
        devices = self.network.kinds
        limits = tuple(min(float(devices[d].memory_bytes) for d in group.devices) for group in parts.groups)
        if costs is not None:
            limits = order_limits(costs, parts.placement, limits)
        return self.lowered(parts, decisions, computed_schedule(decisions.schedule, parts, costs, limits), costs)

    def lowered(self, parts: Parts, decisions: Decisions, computed: Schedule, costs: CostTable | None) -> Schedule:
        """A computed order with its transfers, reductions and gathers put in."""
        parameters = self.parameters(parts, decisions)
        frozen = frozen_in(len(parts.stages), parts.edges, parameters)
        return lower_for(computed, parts.groups, parts.stages, parts.edges, parameters, costs, frozen)

    def plan(self, parts: Parts, decisions: Decisions, schedule: Schedule) -> Plan:
        """The plan of these parts with this lowered order."""
        parameters = self.parameters(parts, decisions)
        cuts = tuple(stage.layers[0] for stage in parts.stages[1:])
        return Plan(
            version=VERSION,
            job=parts.job,
            model=self.source,
            groups=parts.groups,
            spaces=parts.spaces,
            stages=parts.stages,
            edges=parts.edges,
            parameters=parameters,
            order=order_of(schedule, parts.slices),
            hashes=self.hashes,
            decisions=decisions.words(cuts),
            cluster=self.cluster_source,
            recipes=self.programs.recipes_in({s.recipes for s in parts.stages if s.sharding == "searched"}),
        )


def build_plan(
    model: Model, cluster: Cluster, job: Job, decisions: Decisions, *, name: str = "", bench: Workbench | None = None
) -> Plan:
    """The plan that these decisions stand for, without predictions.

    Where the decisions give a stage count and no cuts, the layers are cut by their costs. `name` is what the user
    typed for the model; `bench` saves work when many plans are built for one model and cluster. Raises PlanError for
    decisions that contradict themselves, the job, the model (its layers, its positions) or the cluster, and
    ScheduleError where the schedule cannot be made.
    """
    bench = bench or Workbench(model, cluster, name=name)
    check_decisions(decisions, job, len(bench.module.layers), device_count(cluster))
    check_length(bench.module, model, job.sequence, "job.sequence")
    check_apart(model)
    if decisions.sharding == "searched" and not decisions.recipes:
        bench.search_recipes(job, asked_by(decisions, job.batch))
    if len(decisions.slices) > 1:
        check_sliceable(model, "slices")
    parts = bench.refined(job, decisions, bench.parts(job, decisions))
    return bench.plan(parts, decisions, bench.schedule(parts, decisions, bench.costs(parts)))
