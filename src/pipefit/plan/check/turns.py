"""Rules about round-robin stages: a module held completely on several lanes, each with some of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipefit.errors import PlanError
from pipefit.plan.types import Plan


def turn_problems(plan: Plan) -> Iterator[PlanError]:
    """Yield every error of round-robin stages.

    Each turn must occur once. The stages must be equal, on different lanes, with the same parameters and edges. A lane
    must not use a parameter in two different grids.
    """
    invalid = False
    for index, stage in enumerate(plan.stages):
        if not 0 <= stage.turn < stage.turns:
            invalid = True
            yield PlanError(
                "The turn of a stage is out of range.",
                where=f"stages[{index}].turn",
                seen=f"turn {stage.turn} of {stage.turns}",
                allowed="0 <= turn < turns",
            )
    if invalid:
        return
    for module in dict.fromkeys(stage.module for stage in plan.stages if stage.turns > 1):
        stages = [index for index, stage in enumerate(plan.stages) if stage.module == module]
        problems = [*_module_problems(plan, stages)]
        yield from problems
        if not problems:
            yield from _turn_edge_problems(plan, stages)
            yield from _turn_parameter_problems(plan, stages)
    yield from _shared_on_a_lane(plan)


def _module_problems(plan: Plan, own: Sequence[int]) -> Iterator[PlanError]:
    first = plan.stages[own[0]]
    where = f"stages of module {first.module!r}"
    seen = sorted((plan.stages[index].turn, plan.stages[index].turns) for index in own)
    if seen != [(turn, len(own)) for turn in range(len(own))]:
        yield PlanError(
            "The stages of a module that take turns have every turn once.",
            where=where,
            seen=", ".join(f"turn {turn} of {turns}" for turn, turns in seen),
            allowed=f"turns 0 to {len(own) - 1} of {len(own)}",
        )
        return
    for index in own[1:]:
        for name in ("layers", "space", "microbatch_multiple", "divide"):
            expected, actual = getattr(first, name), getattr(plan.stages[index], name)
            if expected != actual:
                yield PlanError(
                    "Stages that take turns hold the same layers, and take and divide equally many microbatches "
                    "together.",
                    where=f"stages[{index}].{name}",
                    seen=f"{actual}, beside {expected} of stage {own[0]}",
                )
    lanes = [plan.order.placement[index] for index in own]
    if len({*lanes}) < len(lanes):
        yield PlanError(
            "Stages that take turns must be on different lanes.",
            where="order.placement",
            seen=f"lanes {lanes} ({where})",
        )
    units = plan.order.microbatches // first.microbatch_multiple
    if units < len(own):
        yield PlanError(
            "There are fewer microbatches than turns, so that a stage would have nothing to do.",
            where=where,
            seen=f"{plan.order.microbatches} microbatches, {first.microbatch_multiple} together, {len(own)} turns",
            next_step="use more microbatches, or fewer stages that take turns",
        )


def _turn_edge_problems(plan: Plan, own: Sequence[int]) -> Iterator[PlanError]:
    """Yield errors of stages with edges to only some of the round-robin stages: a microbatch of the missing one would
    be lost."""
    for kind in ("source", "target"):
        ends: dict[tuple[int, str], set[int]] = {}
        for edge in plan.edges:
            here, there = (edge.source, edge.target) if kind == "source" else (edge.target, edge.source)
            if here in own:
                ends.setdefault((there, edge.tensor), set()).add(here)
        for (there, tensor), partners in ends.items():
            if len(partners) < len(own):
                yield PlanError(
                    "A stage with an edge to one of several stages that take turns needs an edge to each.",
                    where="edges",
                    seen=f"stage {there}{f', tensor {tensor!r}' if tensor else ''}: only with {sorted(partners)}",
                    allowed=f"edges with all of {list(own)}",
                )


def _turn_parameter_problems(plan: Plan, own: Sequence[int]) -> Iterator[PlanError]:
    for index, parameter in enumerate(plan.parameters):
        if {*own} & {*parameter.uses} and not {*own} <= {*parameter.uses}:
            yield PlanError(
                "Stages that take turns use the same parameters.",
                where=f"parameters[{index}] ({parameter.name}).uses",
                seen=parameter.uses,
                allowed=f"all of {list(own)}",
            )


def _shared_on_a_lane(plan: Plan) -> Iterator[PlanError]:
    for index, parameter in enumerate(plan.parameters):
        grids: dict[int, int] = {}
        for use in parameter.uses:
            first = grids.setdefault(plan.order.placement[use], use)
            if plan.stage_mesh(first) != plan.stage_mesh(use):
                yield PlanError(
                    "Two stages of a lane that use one parameter must have the same grid.",
                    where=f"parameters[{index}] ({parameter.name}).uses",
                    seen=f"stages {first} and {use}, whose groups have different axes",
                )
