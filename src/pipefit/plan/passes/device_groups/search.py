"""Plans whose stages are held by groups of devices: searched after the main search, and kept if they are faster.

Every layout of groups (`layouts.py`) has a lower bound for each number of microbatches (`group_bounds.py`); layouts
that cannot beat the best known plan are dropped. Programs are searched for the most promising ones
(`program_costs.py`): their costs raise the bounds. Then, by the time of 1F1B, the forms of the hidden state between
groups are chosen (`hidden_forms.py`), the layers cut and the step simulated as for all candidates. The best layouts get
the orders of the other families, fitted orders, and slices (`sliced_layouts.py`). The budget counts evaluations, so the
plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from pipefit.cost.static_memory import COMPUTE_BYTES
from pipefit.errors import PipefitError, PlanError
from pipefit.layout import TensorForm
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import size_value
from pipefit.optimizers.sharded_state import ShardedState, leanest_state, searched_states, state_choices
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.candidates.queue import SearchCandidate
from pipefit.plan.candidates.space import RECOMPUTE_CHOICES
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.device_groups.group_bounds import GroupLowerBounds, LaneLoads, step_bound_s, step_guess_s
from pipefit.plan.passes.device_groups.group_budget import GROUP_BUDGET
from pipefit.plan.passes.device_groups.hidden_forms import LaneForms, cheapest_forms, single_device_lane
from pipefit.plan.passes.device_groups.layouts import Devices, GroupLayout, iter_layouts, reorder_lanes
from pipefit.plan.passes.device_groups.program_costs import GroupRequest, ProgramOracle
from pipefit.plan.passes.device_groups.sliced_layouts import with_slices
from pipefit.plan.passes.fitted_orders import FITTING_BUDGET, affordable_choices, fit_layout
from pipefit.plan.passes.search import TIE, LayoutSearch
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig, check_config
from pipefit.plan.request.sliceable import document_obstacles
from pipefit.plan.types import Job
from pipefit.schedule.families import DEFAULT_FAMILY, FAMILIES
from pipefit.schedule.fit.family import FIT
from pipefit.shard.synthesize import SynthesizedProgram
from pipefit.units import format_seconds


@dataclass(frozen=True, slots=True)
class GroupingResult:
    """Result of the search for groups."""

    found: SearchResult
    note: str
    "Text for the plan; '' if groups gained nothing."


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """A layout that may win."""

    step_s: float
    "First a lower bound, later an estimate."
    layout: GroupLayout
    microbatches: int


def search_groups(context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> GroupingResult:
    """Return the search result, with the plans of groups that beat it."""
    if not _groups_apply(context, job, constraints):
        return GroupingResult(found, "")
    looker = GroupSearch(context, job, constraints, found)
    group_plans = looker.run()
    best = found.fitting[0].step_s if found.fitting else float("inf")
    fitting = sorted((*found.fitting, *group_plans), key=lambda one: one.rank_key)
    note = ""
    if group_plans and group_plans[0].step_s < best * (1 - TIE):
        gain = (
            f"{1 - group_plans[0].step_s / best:.1%} less than without ({format_seconds(best)})"
            if found.fitting
            else ""
        )
        counted = f"{looker.looked} layouts, programs searched for {looker.oracle.searched_count} groups"
        note = f"groups: {counted}, {looker.simulated_count} simulated; {gain or 'nothing fits without'}"
    return GroupingResult(replace(found, fitting=tuple(fitting)) if group_plans else found, note)


def _groups_apply(context: PlannerContext, job: Job, constraints: Constraints) -> bool:
    """Return whether groups are enabled, the constraints leave room for them, and the cluster has several devices."""
    if constraints.groups is False or constraints.state_group:
        return False
    if constraints.devices_per_replica > constraints.shard_count:  # a context or an expert axis
        return False
    excluding = (constraints.placement, constraints.cuts, constraints.inner)
    if context.network.devices < 2 or excluding != (None, None, None) or constraints.slices not in (None, 1):
        return False
    if constraints.mapping not in (None, "search", "hostname"):
        return False
    if len(constraints.shards or (1, 1)) < 2 or constraints.sharding not in (None, "searched"):
        return False
    return not (job.documents == "apart" and any(document_obstacles(context.model, "--documents")))


class GroupSearch:
    def __init__(self, context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> None:
        self.context, self.job, self.constraints = context, job, constraints
        self.found = found
        self.best_s = next((plan.step_s for plan in found.fitting if not plan.decisions.slices), float("inf"))
        "Step of the best plan without slices: groups get slices afterwards."
        self.searched_states = searched_states(context.layer_cutter.fleet.is_mixed)
        self.floors = GroupLowerBounds(context, job)
        self.oracle = ProgramOracle(context, job, constraints.shards or ())
        self.searcher = LayoutSearch(context, job, constraints, 1)
        self.looked = 0
        self.spent = 0
        self.over: dict[object, float] = {}
        "Ratio of program cost to lower bound, by the key of groups that are alike."
        self.tied = _has_tied_layers(context)
        self.divisors = [count for count in range(1, job.batch + 1) if job.batch % count == 0]

    @property
    def simulated_count(self) -> int:
        return self.searcher.simulated

    def run(self) -> list[EvaluatedPlan]:
        """Return the plans found, the fastest first, including plans no faster than the known ones."""
        candidates = sorted(self.promising_candidates(), key=lambda candidate: candidate.step_s)
        guessed = sorted(self.search_programs(candidates), key=lambda candidate: candidate.step_s)
        evaluated = self.evaluate_candidates(guessed[: GROUP_BUDGET.layouts])
        best = {
            candidate.layout: candidate for candidate in (*(candidate for _, candidate in evaluated[:1]), *guessed[:1])
        }.values()
        network = self.context.network
        evaluated += self.evaluate_candidates(
            replace(candidate, layout=plan) for candidate in best for plan in reorder_lanes(network, candidate.layout)
        )
        first = [plan for plan, _ in evaluated[: GROUP_BUDGET.fitted_layouts]]
        ranked = [plan for plan, _ in sorted(evaluated, key=lambda plan: plan[0].rank_key)]
        first += [plan for plan in ranked[:1] if plan not in first]
        fitted_plans = [fitted for plan in first for fitted in self.other_orders(plan)]
        least_s = min((plan.step_s for plan in (*self.found.fitting[:1], *ranked[:1])), default=float("inf"))
        sliced, simulated = with_slices(self.context, self.job, self.constraints, ranked, least_s)
        self.searcher.simulated += simulated
        return sorted((*ranked, *fitted_plans, *sliced), key=lambda plan: plan.rank_key)

    def promising_candidates(self) -> Iterator[GroupCandidate]:
        """Yield layouts and numbers of microbatches whose lower bound is below the best known plan."""
        layers = len(self.context.only_module.layers)
        recompute: Recompute = self.constraints.recompute[0] if self.constraints.recompute is not None else "none"
        sharded_state = leanest_state(self.constraints.sharded_state, self.searched_states)
        for layout in iter_layouts(self.context.network, self.job.batch, layers, self.constraints.devices):
            if not self.obeys_constraints(layout) or not self.floors.has_room(layout, sharded_state):
                continue
            self.looked += 1
            for count in self.microbatch_counts(layout):
                rows = self.job.batch // count // layout.replica_count
                floor_s = step_bound_s(self.floors.lane_loads(layout, rows, count, recompute), len(layout.lanes), count)
                if floor_s < self.best_s * (1 - TIE):
                    yield GroupCandidate(floor_s, layout, count)

    def obeys_constraints(self, layout: GroupLayout) -> bool:
        """Return whether the layout obeys the constraints."""
        replicas, stages, shards = self.constraints.replicas, self.constraints.stages, self.constraints.shards
        if replicas is not None and (len(replicas) != layout.replica_count or len({*replicas}) > 1):
            return False
        if shards is not None and any(len(lane[0]) != len(shards) for lane in layout.lanes):
            return False
        return stages is None or stages == len(layout.lanes)

    def microbatch_counts(self, layout: GroupLayout) -> list[int]:
        """Return numbers of microbatches with the same number of rows on every replica."""
        fixed_count = self.constraints.microbatches
        counts = [fixed_count] if fixed_count else self.divisors
        return [count for count in counts if self.job.batch % (count * layout.replica_count) == 0]

    def search_programs(self, candidates: Sequence[GroupCandidate]) -> Iterator[GroupCandidate]:
        """Yield the candidates that may still win once their programs are known, with the time of 1F1B.

        The most promising ones come first, until enough programs were searched.
        """
        is_large = self.context.network.devices > GROUP_BUDGET.exhaustive_devices
        limit = GROUP_BUDGET.programs_on_many if is_large else GROUP_BUDGET.programs
        for index, candidate in enumerate(candidates):
            self.context.tracker.count_left(len(candidates) - index)
            lanes, count = len(candidate.layout.lanes), candidate.microbatches
            if step_bound_s(self.lane_loads(candidate, self.expected_cost_s), lanes, count) >= self.best_s * (1 - TIE):
                continue
            if self.oracle.searched_count >= limit:
                return
            if step_bound_s(self.lane_loads(candidate, self.least_cost_s), lanes, count) >= self.best_s * (1 - TIE):
                continue
            busy = self.lane_loads(candidate, self.known_cost_s)
            if step_bound_s(busy, lanes, count) < self.best_s * (1 - TIE):
                yield replace(candidate, step_s=step_guess_s(busy, lanes, count))

    def lane_loads(
        self, candidate: GroupCandidate, cost_s: Callable[[tuple[Devices, ...], GroupRequest | None, float], float]
    ) -> LaneLoads:
        """Return the load of the lanes for a microbatch; `cost_s` gives a lane's cost from (lane, request, lower
        bound)."""
        rows = self.job.batch // candidate.microbatches // candidate.layout.replica_count
        asks = {
            self.floors.lane_key(lane): ask
            for lane, ask in zip(candidate.layout.lanes, self.lane_requests(candidate), strict=True)
        }
        costs = [
            (
                count,
                cost_s(lane, asks[self.floors.lane_key(lane)], self.floors.group_s(lane, rows, candidate.microbatches)),
            )
            for lane, count in self.floors.distinct_lanes(candidate.layout)
        ]
        return self.floors.shared_loads(costs)

    def expected_cost_s(self, lane: tuple[Devices, ...], ask: GroupRequest | None, floor_s: float) -> float:
        """Return the likely cost of the lane's programs, from other requests of the same groups."""
        return floor_s * (1.0 if ask is None else self.over.get(self.floors.lane_key(lane), 1.0))

    def least_cost_s(self, lane: tuple[Devices, ...], ask: GroupRequest | None, floor_s: float) -> float:
        """Return the cost of the lane's programs without a memory limit, searching them if necessary."""
        if ask is None:
            return floor_s
        cost_s = self.oracle.least_s(ask)
        key = self.floors.lane_key(lane)
        self.over[key] = min(self.over.get(key, float("inf")), max(1.0, GROUP_BUDGET.ratio_discount * cost_s / floor_s))
        return cost_s

    def known_cost_s(self, lane: tuple[Devices, ...], ask: GroupRequest | None, floor_s: float) -> float:
        """Return the cost of the lane's programs within memory; infinite if there are none."""
        if ask is None:
            return floor_s
        best = self.oracle.best_programs(ask)
        return best.cost_s if best is not None else float("inf")

    def lane_requests(self, candidate: GroupCandidate) -> list[GroupRequest | None]:
        """Return the request for every lane; None for lanes of single devices."""
        layout, count = candidate.layout, candidate.microbatches
        rows = self.job.batch // count // layout.replica_count
        rates = [1 / self.floors.group_s(lane, rows, count) for lane in layout.lanes]
        return [
            GroupRequest(
                lane=lane,
                rows=rows,
                microbatches=count,
                part=rate / fsum(rates),
                tied_whole=self.tied and len(rates) > 1,
            )
            if len(lane[0]) > 1
            else None
            for lane, rate in zip(layout.lanes, rates, strict=True)
        ]

    def evaluate_candidates(self, candidates: Iterable[GroupCandidate]) -> list[tuple[EvaluatedPlan, GroupCandidate]]:
        """Return the evaluated candidates, the fastest first, stopping when none can win or the budget is spent."""
        evaluated: list[tuple[EvaluatedPlan, GroupCandidate]] = []
        for candidate in candidates:
            patience = 1 if self.best_s < float("inf") else GROUP_BUDGET.infeasible_factor
            if self.spent > GROUP_BUDGET.simulated_actions * patience:
                break
            if candidate.step_s > self.best_s * (1 + FITTING_BUDGET.step_slack):
                break
            new = self.evaluate_candidate(candidate)
            self.best_s = min((self.best_s, *(plan.step_s for plan in new)))
            evaluated += [(plan, candidate) for plan in new]
        return sorted(evaluated, key=lambda plan: plan[0].rank_key)

    def evaluate_candidate(self, candidate: GroupCandidate) -> list[EvaluatedPlan]:
        """Cut and simulate a layout, with more recomputation or sharded optimizer state until it fits."""
        laid = self.build_decisions(candidate)
        if laid is None:
            return []
        for recompute, sharded_state in self.leaner_choices(candidate.layout):
            decisions = replace(laid, recompute=recompute, sharded_state=sharded_state)
            known = {id(plan) for plan in self.searcher.fitting}
            self.spent += 3 * decisions.stage_count * decisions.microbatches
            lean = SearchCandidate(decisions)
            again: float | None = 0.0
            try:
                while again is not None and again < self.best_s * (1 + FITTING_BUDGET.step_slack):
                    again = self.searcher.raise_level(lean, again)
            except FormsError:  # the layers at a cut have incompatible forms
                return []
            new = [plan for plan in self.searcher.fitting if id(plan) not in known]
            if new or again is not None:
                return new
        return []

    def leaner_choices(self, layout: GroupLayout) -> Iterator[tuple[tuple[Recompute, ...], ShardedState]]:
        """Yield choices of recomputation and sharded state, the fastest first."""
        recomputes = [self.constraints.recompute] if self.constraints.recompute is not None else RECOMPUTE_CHOICES
        states = state_choices(self.constraints.sharded_state, layout.replica_count, self.searched_states)
        for recompute in recomputes:
            if len(recompute) in (1, len(layout.lanes)):
                yield from ((recompute, state) for state in states)

    def build_decisions(self, candidate: GroupCandidate) -> ParallelConfig | None:
        """Return the decisions of a layout, its programs with the cheapest combination of forms; None if there are
        none.

        They use no recomputation and no sharded optimizer state.
        """
        layout, count = candidate.layout, candidate.microbatches
        rows = self.job.batch // count // layout.replica_count
        held: list[LaneForms] = []
        sets: list[Mapping[TensorForm, SynthesizedProgram]] = []
        for lane, ask in zip(layout.lanes, self.lane_requests(candidate), strict=True):
            if ask is None:
                held.append(single_device_lane(lane[0][0], self.floors.group_s(lane, rows, count)))
                sets.append({})
                continue
            forms = self.oracle.programs_by_form(ask)
            if not forms:
                return None
            shares = next(iter(forms.values())).shares
            costs = {form: programs.cost_s * ask.part for form, programs in forms.items()}
            held.append(LaneForms(devices=lane[0], shares=shares, cost_s=costs))
            sets.append(forms)
        placement = tuple(range(len(layout.lanes)))
        width = COMPUTE_BYTES[self.job.precision]
        chosen = cheapest_forms(self.context.network, held, placement, self.hidden_shape(rows), width)
        if chosen is None:
            return None
        lane_programs = [forms[form] if forms else None for forms, form in zip(sets, chosen, strict=True)]
        if (
            len(lane_programs) == 1 and (ask := self.lane_requests(candidate)[0]) is not None
        ):  # no boundary: every layer uses its best form
            lane_programs = [self.oracle.model_programs(ask)]
        recipes = [self.register_recipes(programs) if programs else "" for programs in lane_programs]
        shards = tuple(
            programs.shares if programs else lane.shares for programs, lane in zip(lane_programs, held, strict=True)
        )
        decisions = ParallelConfig(
            stages=len(layout.lanes),
            replicas=(1,) * layout.replica_count,
            shards=max(shards, key=len),
            sharding="searched",
            lane_shards=shards,
            recipes=tuple(recipes),
            microbatches=count,
            schedule=self.schedule_name(),
            devices=layout.device_order,
        )
        return decisions if self.is_valid(decisions) else None

    def register_recipes(self, found: SynthesizedProgram) -> str:
        """Add a set of recipes to the planner's programs and return its name."""
        links = dict(zip((layer.graph for layer in self.context.only_module.layers), found.links, strict=True))
        return self.context.programs.add_recipes(
            {graph: link.layer_recipe.recipe_text for graph, link in links.items()}
        )

    def schedule_name(self) -> str:
        """Return the constrained schedule family; the default one for `fit`, whose orders another pass adds."""
        name = self.constraints.schedule or DEFAULT_FAMILY
        return DEFAULT_FAMILY if FAMILIES[name].is_fitted else name

    def is_valid(self, decisions: ParallelConfig) -> bool:
        """Return whether the job and the schedule allow the decisions."""
        placement = FAMILIES[decisions.schedule].placement(decisions.lane_count)
        if placement != decisions.lane_of_stage or decisions.unit_count < FAMILIES[decisions.schedule].least_units(
            decisions.lane_count
        ):
            return False
        try:
            check_config(decisions, self.job, len(self.context.only_module.layers), self.context.network.devices)
        except PlanError:
            return False
        return True

    def hidden_shape(self, rows: int) -> tuple[int, ...]:
        """Return the hidden state's shape for a microbatch on one replica: that of the layer nearest to the middle.

        Only layers whose output has the maximum number of dimensions are considered.
        """
        graphs = [self.context.model.layer_graph(layer) for layer in self.context.only_module.layers[:-1]]
        shapes = [graph.find_tensor(graph.outputs[0]).shape for graph in graphs]
        dimensions = max(map(len, shapes), default=0)
        able = [index for index, shape in enumerate(shapes) if len(shape) == dimensions]
        if not able:
            return ()
        symbols = {"B": rows, "T": self.job.sequence}
        middle = min(able, key=lambda index: abs(2 * index + 1 - len(shapes)))
        return tuple(size_value(size, symbols) for size in shapes[middle])

    def other_orders(self, one: EvaluatedPlan) -> Iterator[EvaluatedPlan]:
        """Yield the layout of a plan with an order fitted to its memory, if that is faster."""
        if one.decisions.lane_count == 1 or self.constraints.schedule not in (None, FIT):
            return
        try:
            choices = affordable_choices(self.context, self.job, self.constraints, one.decisions)
            fitted = fit_layout(self.context, choices[0]) if choices is not None else None
        except PipefitError:
            return
        if fitted is not None and fitted.step_s < one.step_s * (1 - TIE):
            yield fitted


def _has_tied_layers(context: PlannerContext) -> bool:
    """Return whether layers share parameters."""
    names = [name for layer in context.only_module.layers for name in layer.parameters.values()]
    return len({*names}) < len(names)
