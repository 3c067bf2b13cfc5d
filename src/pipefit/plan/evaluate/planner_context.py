"""Assembly of a plan from explicit decisions: deterministic, and used everywhere that plans are made.

The search calls it for its winner; tests and tools call it directly. A plan written by hand has the same parts.
"""

from __future__ import annotations

from dataclasses import replace

from pipefit.cluster.files import check_peaks
from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.codec import content_digest
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.memory.order_limits import order_limits
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.errors import PlanError
from pipefit.model.graph import Model, ModelModule
from pipefit.optimizers.sharded_state import effective_state
from pipefit.plan.assemble.module_parts import module_parameters
from pipefit.plan.assemble.order import computed_schedule, find_frozen_stages, lower_for_plan, make_schedule_plan
from pipefit.plan.assemble.pipeline_work import PlanSkeleton, pipeline_work
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.assemble.shard_recipes import RecipeRequest, recipe_chains, request_from_config, searched_recipes
from pipefit.plan.assemble.structure import make_edges, make_groups, make_stages
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.cutting.refine import refine_cuts
from pipefit.plan.evaluate.search_progress import SearchTracker
from pipefit.plan.request.context_parts import CONTEXT, check_context_model
from pipefit.plan.request.decisions import ParallelConfig, check_config
from pipefit.plan.request.expert_parts import check_experts
from pipefit.plan.request.sequence_length import check_length
from pipefit.plan.request.sliceable import check_sliceable
from pipefit.plan.types import InputHashes, Job, ModelSource, ParameterPlan, Plan, SampleSpace
from pipefit.schedule.actions import Schedule
from pipefit.shard.apart import check_row_independence
from pipefit.simulate import simulate_schedule

VERSION = 2


class PlannerContext:
    """A model and a cluster, with everything that is computed about them once and used for many plans."""

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
        self.programs = ProgramCache(model)
        self.layers: LayerCosts = layers or best_costs(cluster, graphs=model.graphs.values())
        self.source = ModelSource(name=name or model.family, family=model.family, config=model.config)
        self.cluster_source = cluster_source
        self.tracker = SearchTracker()
        self.context_parts = 1
        "Number of devices that hold parts of each sequence in all plans that are made (`split_sequences`)."
        self._searched_for: tuple[Job, RecipeRequest] | None = None
        self._cutters: dict[int, LayerCutter] = {}
        self.hashes = InputHashes(model=model.hash, cluster=content_digest(cluster))

    @property
    def only_module(self) -> ModelModule:
        """The only module. Raises PlanError if there are several."""
        if len(self.model.modules) != 1:
            raise PlanError(
                "Plans of several modules are not searched yet; they can be written by hand.",
                where="model.modules",
                seen=", ".join(module.name for module in self.model.modules),
                next_step="see docs/reference/plan-format.md",
            )
        return self.model.modules[0]

    def make_skeleton(self, job: Job, decisions: ParallelConfig) -> PlanSkeleton:
        """Return the groups, stages and edges of these decisions. Without cuts, the layers are cut by their costs."""
        module = self.only_module
        cut = self.layer_cutter.cut_layers(job, decisions)
        cuts = decisions.cuts or (cut or self.layer_cutter.leanest_cut(job, decisions)).cuts
        stages, groups = make_stages(module, decisions, cuts, self.programs), make_groups(decisions)
        sharded_state = effective_state(decisions.sharded_state, decisions.state_devices)
        return PlanSkeleton(
            job=job,
            groups=groups,
            spaces=(SampleSpace(name=module.space, rows=job.batch, tokens=job.sequence),),
            stages=stages,
            edges=make_edges(module, stages, groups, self.programs),
            placement=decisions.lane_of_stage,
            microbatches=decisions.microbatches,
            slices=decisions.slices or (job.sequence,),
            sharded_state=(sharded_state,) * len(stages),
        )

    def refine_skeleton(self, job: Job, decisions: ParallelConfig, parts: PlanSkeleton) -> PlanSkeleton:
        """Return these parts with refined cuts if that shortens the step (`cutting/refine.py`). The decisions must have
        no cuts."""

        def skeleton_with_cuts(cuts: tuple[int, ...]) -> PlanSkeleton:
            return self.make_skeleton(job, replace(decisions, cuts=cuts))

        def costs_with_cuts(cuts: tuple[int, ...]) -> CostTable:
            return self.build_cost_table(skeleton_with_cuts(cuts))

        def peaks_with_cuts(cuts: tuple[int, ...]) -> list[float]:
            costs = costs_with_cuts(cuts)
            return [
                float(peak)
                for peak in simulate_schedule(
                    self.build_schedule(skeleton_with_cuts(cuts), decisions, costs), costs
                ).peak_bytes
            ]

        cuts = refine_cuts(self.layer_cutter, job, decisions, parts, costs_with_cuts, peaks_with_cuts)
        return parts if cuts == tuple(stage.layers[0] for stage in parts.stages[1:]) else skeleton_with_cuts(cuts)

    def search_recipes(self, job: Job, asked: RecipeRequest) -> None:
        """Search the shard programs of the module's layers; afterwards `searched` without a name means these."""
        if self._searched_for == (job, asked):
            return
        self._searched_for = (job, asked)
        chains = recipe_chains(self.model, self.network, self.layers, job, asked)
        self.programs = ProgramCache(self.model, searched_recipes(chains, self.only_module, asked))
        self._cutters.clear()  # they hold the previous programs

    def split_sequences(self, parts: int) -> PlannerContext:
        """Return this context, which now makes plans whose meshes have a context axis of this size. Raises PlanError if
        the model prevents that."""
        check_context_model(self.model, parts, CONTEXT)
        self.context_parts = parts
        return self

    def with_cluster(self, cluster: Cluster) -> PlannerContext:
        """Return a context of the same model on another cluster."""
        context = PlannerContext(self.model, cluster, self.layers, self.source.name)
        context.programs, context.tracker, context.context_parts = self.programs, self.tracker, self.context_parts
        return context

    @property
    def layer_cutter(self) -> LayerCutter:
        """The layer cutter of the only module, for sequences split as now."""
        parts = self.context_parts
        if parts not in self._cutters:
            self._cutters[parts] = LayerCutter(self.programs, self.only_module.name, self.network, self.layers, parts)
        return self._cutters[parts]

    def build_cost_table(self, parts: PlanSkeleton) -> CostTable:
        """Return the cost table of these parts."""
        return cost_table(pipeline_work(parts, self.programs), self.network, self.layers)

    def plan_parameters(self, parts: PlanSkeleton, decisions: ParallelConfig) -> tuple[ParameterPlan, ...]:
        """Return the parameters of these parts."""
        return module_parameters(self.model, parts, self.programs)

    def build_schedule(self, parts: PlanSkeleton, decisions: ParallelConfig, costs: CostTable | None) -> Schedule:
        """Return the lowered order of the chosen family for these parts, with transfers placed by the times of
        `build_cost_table`. A family that adapts to memory gets the limits of the devices."""
        devices = self.network.kinds
        limits = tuple(min(float(devices[d].memory_bytes) for d in group.devices) for group in parts.groups)
        if costs is not None:
            limits = order_limits(costs, parts.placement, limits)
        return self.lower_order(parts, decisions, computed_schedule(decisions.schedule, parts, costs, limits), costs)

    def lower_order(
        self, parts: PlanSkeleton, decisions: ParallelConfig, computed: Schedule, costs: CostTable | None
    ) -> Schedule:
        """Return a computed order with its transfers, reductions and gathers."""
        parameters = self.plan_parameters(parts, decisions)
        frozen = find_frozen_stages(len(parts.stages), parts.edges, parameters)
        return lower_for_plan(computed, parts.groups, parts.stages, parts.edges, parameters, costs, frozen)

    def assemble_plan(self, parts: PlanSkeleton, decisions: ParallelConfig, schedule: Schedule) -> Plan:
        """Return the plan of these parts with this lowered order."""
        parameters = self.plan_parameters(parts, decisions)
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
            order=make_schedule_plan(schedule, parts.slices),
            hashes=self.hashes,
            decisions=decisions.to_constraints(cuts),
            cluster=self.cluster_source,
            recipes=self.programs.recipes_in({s.recipes for s in parts.stages if s.sharding == "searched"}),
        )


def build_plan(
    model: Model,
    cluster: Cluster,
    job: Job,
    decisions: ParallelConfig,
    *,
    name: str = "",
    context: PlannerContext | None = None,
) -> Plan:
    """Return the plan of these decisions, without predictions.

    Without cuts in the decisions, the layers are cut by their costs. `name` is the text that the user typed for the
    model; `context` saves work if many plans are built for one model and cluster. Raises PlanError for decisions that
    contradict each other, the job, the model (its layers, its positions) or the cluster, and ScheduleError if the
    schedule cannot be built.
    """
    context = context or PlannerContext(model, cluster, name=name)
    check_peaks(cluster, job.precision, "job.precision")
    check_config(decisions, job, len(context.only_module.layers), device_count(cluster))
    check_length(context.only_module, model, job.sequence, "job.sequence")
    check_row_independence(model)
    if decisions.splits_rows:
        check_experts(model, decisions.shards, "sharding")
    elif decisions.expert > 1:
        check_experts(model, decisions.shards, "expert", decisions.expert)
    context.split_sequences(decisions.context)
    if decisions.sharding == "searched" and not decisions.recipes:
        context.search_recipes(job, request_from_config(decisions, job.batch))
    if len(decisions.slices) > 1:
        check_sliceable(model, "slices")
    parts = context.refine_skeleton(job, decisions, context.make_skeleton(job, decisions))
    return context.assemble_plan(
        parts, decisions, context.build_schedule(parts, decisions, context.build_cost_table(parts))
    )
