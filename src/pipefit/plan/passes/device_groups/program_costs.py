"""Searched programs of device groups and their costs: searched once for groups that are alike.

Two groups are alike if their kinds of devices, their costs of collectives, and their requests are the same. A search
covers all distinct layers of the model, one recipe each, so any stage costs the sum of its layers (equal layers are
searched once, and counted as often as they occur). Memory is considered only where the cost without it is promising.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.errors import PlanError
from pipefit.layout import IDENTITY, TensorForm, shard_form
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.device_groups.group_budget import GROUP_BUDGET
from pipefit.plan.passes.device_groups.layouts import Devices
from pipefit.plan.types import Job
from pipefit.shard.chain import ChainSearch
from pipefit.shard.segments import segment_shares
from pipefit.shard.synthesize import SynthesizedProgram, cheapest_program, leanest_program

STREAMS: tuple[TensorForm, ...] = (IDENTITY, shard_form(0), shard_form(1), shard_form(2))
"""Forms of the hidden state on a group: replicated, sharded by rows, by tokens, by features. The last form, which heads
mostly rule out, is tried on few devices only."""

COMPARED_BYTES = (4096.0, 2.0**20, 2.0**28)
"""Bytes at which the times of collectives are compared to tell whether groups are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A lane's groups, and the work they are to do."""

    lane: tuple[Devices, ...]
    rows: int
    "Rows of a microbatch on each group."
    microbatches: int
    part: float
    "Estimated fraction of all layers on this lane."
    tied_whole: bool
    "True if other lanes may use parameters that this one uses."


@dataclass(slots=True)
class _KnownPrograms:
    chains: ChainSearch
    shares: tuple[int, ...]
    "Constrained shares; empty: the best ones."
    free: SynthesizedProgram | None
    "The cheapest programs, without a memory limit."
    best: SynthesizedProgram | None = None
    "The cheapest programs that fit; set once they were requested."
    forms: dict[TensorForm, SynthesizedProgram | None] = field(default_factory=dict)


class ProgramOracle:
    """The programs of groups."""

    def __init__(self, context: PlannerContext, job: Job, shares: tuple[int, ...] = ()) -> None:
        """`shares` are those of every group, if constrained."""
        self.context, self.job, self.shares = context, job, shares
        self._known: dict[object, _KnownPrograms] = {}

    @property
    def searched_count(self) -> int:
        """Number of distinct groups that were searched."""
        return len(self._known)

    def least_s(self, ask: GroupRequest) -> float:
        """Return the cost of programs of all layers without a memory limit; infinite if there are none."""
        free = self._search_programs(ask).free
        return float("inf") if free is None else free.cost_s

    def best_programs(self, ask: GroupRequest) -> SynthesizedProgram | None:
        """Return the cheapest programs and shares of all layers that fit in memory, or nearly; None if there are
        none."""
        answer = self._search_programs(ask)
        if answer.best is None and answer.free is not None:
            answer.best = self._leanest_programs(answer.chains, answer.shares, answer.free)
        return answer.best

    def programs_by_form(self, ask: GroupRequest) -> Mapping[TensorForm, SynthesizedProgram]:
        """Return the cheapest programs with the best shares for every form of the hidden state between layers."""
        answer, best = self._search_programs(ask), self.best_programs(ask)
        if best is None:
            return {}
        for form in STREAMS if self.context.network.devices <= GROUP_BUDGET.exhaustive_devices else STREAMS[:3]:
            if form not in answer.forms:
                free, answer.chains.streams = answer.chains.streams, (form,)
                answer.forms[form] = self._leanest_programs(answer.chains, best.shares)
                answer.chains.streams = free
        return {form: programs for form, programs in answer.forms.items() if programs is not None}

    def model_programs(self, ask: GroupRequest) -> SynthesizedProgram | None:
        """Return the best programs of one group for the whole model.

        Parts of the model get different shares if that is cheaper; not if shares are constrained, or on many devices.
        """
        programs = self.best_programs(ask)
        if programs is None or self.shares or self.context.network.devices > GROUP_BUDGET.exhaustive_devices:
            return programs
        return segment_shares(self._search_programs(ask).chains, self.context.only_module.layers, programs)

    def _search_programs(self, ask: GroupRequest) -> _KnownPrograms:
        key = self._request_key(ask)
        if key not in self._known:
            context, job = self.context, self.job
            setting = shard_setting(
                context.model,
                context.network,
                context.layers,
                devices=ask.lane[0],
                rows=ask.rows,
                tokens=job.sequence,
                precision=job.precision,
                optimizer=job.optimizer,
                microbatches=ask.microbatches,
                lanes=_estimate_lanes(ask),
                beside=ask.lane[1:],
            )
            chains = ChainSearch(context.model, setting, tied_whole=ask.tied_whole)
            if context.network.devices > GROUP_BUDGET.exhaustive_devices:
                chains.streams = STREAMS[:3]
            alike = len(setting.distinct_kinds) == 1
            shares = self.shares or ((1,) * len(setting.kinds) if alike else ())
            self._known[key] = _KnownPrograms(
                chains, shares, cheapest_program(chains, context.only_module.layers, shares)
            )
        return self._known[key]

    def _leanest_programs(
        self, chains: ChainSearch, shares: tuple[int, ...], found: SynthesizedProgram | None = None
    ) -> SynthesizedProgram | None:
        try:
            return leanest_program(chains, self.context.only_module.layers, shares, found)
        except PlanError:
            return None

    def _request_key(self, ask: GroupRequest) -> object:
        network = self.context.network
        kinds = tuple(network.kinds[device].name for device in ask.lane[0])
        prices = tuple(
            price(network, ask.lane, size)
            for price in (all_gather_s, reduce_scatter_s, all_reduce_s)
            for size in COMPARED_BYTES
        )
        return kinds, prices, ask.rows, ask.microbatches, _estimate_lanes(ask), ask.tied_whole


def _estimate_lanes(ask: GroupRequest) -> int:
    return max(1, ceil(1 / ask.part - 1e-6))
