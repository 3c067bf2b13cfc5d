"""A layout that the user had in mind beside the chosen plan: where its step goes, and why it lost.

Both plans are simulated on the same model and cluster. `pipefit explain PLAN --why-not "tp=8 pp=4"` prints the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.cluster.types import Cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.errors import DoesNotFitError, PlanError
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.explain.step_parts import STEP_PARTS, describe_part, step_parts
from pipefit.plan.explain.text import TextTable, choice_cells, choice_keys
from pipefit.plan.request.constraints import Constraints, parse_constraints
from pipefit.plan.request.sampled_batches import SampledBatches, samples_of_spaces
from pipefit.plan.types import Plan
from pipefit.units import format_bytes, format_seconds

OPTION = "--why-not"

EQUAL = 1e-6
"""Relative difference below which two step times count as equal."""

NOTED = 0.2
"""A second cause, or a gain, is named if it is at least this fraction of the largest cause."""

StepSeconds = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFigures:
    """The simulated figures of one plan. The memory counts on the device that is fullest relative to its limit."""

    decisions: Mapping[str, str]
    step_s: float
    parts_s: StepSeconds
    "Seconds of the busiest lane by part (`step_parts.py`); they add up to the step."
    peak_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutComparison:
    """The chosen plan and the best plan of the layout asked for."""

    words: str
    "The layout as the user typed it."
    chosen: LayoutFigures
    asked: LayoutFigures

    @property
    def difference_s(self) -> StepSeconds:
        """Seconds by part that the layout asked for takes more than the chosen plan."""
        return {name: self.asked.parts_s[name] - self.chosen.parts_s[name] for name in STEP_PARTS}


def parse_layout(words: str, batch: int) -> Constraints:
    """Return the constraints of `tp=8 pp=4`: keys and aliases of `--fix`, with spaces between them.

    Raises PlanError as `parse_constraints` does, and for no words at all.
    """
    texts = words.split()
    if not texts:
        raise PlanError(
            "The layout to compare with is empty.",
            where=OPTION,
            seen=repr(words),
            allowed='choices with spaces between them, such as "tp=8 pp=4"',
            next_step="`pipefit plan --help` names the keys",
        )
    try:
        return parse_constraints(texts, batch)
    except PlanError as error:
        raise rename_option(error) from None


def rename_option(error: PlanError) -> PlanError:
    """Return the error about `--fix` in the words of `--why-not`."""

    def rename(text: object) -> str | None:
        return None if text is None else str(text).replace("--fix has", f"{OPTION} has").replace("--fix ", "")

    where = None if error.where is None else error.where.replace("--fix", OPTION)
    return type(error)(
        rename(error.what) or "", where=where, seen=error.seen, allowed=error.allowed, next_step=rename(error.next_step)
    )


def samples_of_plan(plan: Plan) -> SampledBatches | None:
    """Return the batch of unequal samples that the plan was simulated on; None if all samples are equal rows."""
    return samples_of_spaces(plan.spaces, "samples: the batch of the plan") if plan.arranging else None


def compare_layouts(words: str, chosen: Plan, asked: Plan, model: Model, cluster: Cluster) -> LayoutComparison:
    """Return the simulated figures of both plans, which must be of this model and cluster."""
    network, layers = Network(cluster), best_costs(cluster, graphs=model.graphs.values())

    def simulate_figures(plan: Plan) -> LayoutFigures:
        simulation = simulate_plan(plan, model, cluster, network=network, layers=layers)
        memory = zip(simulation.peaks_bytes, simulation.limits_bytes, strict=True)
        peak_bytes, limit_bytes = max(memory, key=lambda lane: lane[0] / lane[1])
        return LayoutFigures(
            decisions=plan.decisions,
            step_s=simulation.timeline.makespan_s,
            parts_s=step_parts(simulation, network, layers),
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
        )

    return LayoutComparison(words=words, chosen=simulate_figures(chosen), asked=simulate_figures(asked))


def explain_difference(comparison: LayoutComparison) -> str:
    """Return one sentence: the difference of the layout asked for to the chosen plan, and its cause in seconds."""
    asked, chosen, words = comparison.asked, comparison.chosen, comparison.words
    if asked.decisions == chosen.decisions:
        return f"The chosen plan is the best plan with {words}."
    change = asked.step_s / chosen.step_s - 1
    times = f"{format_seconds(asked.step_s)} against {format_seconds(chosen.step_s)}"
    if abs(change) < EQUAL:
        more_bytes = asked.peak_bytes - chosen.peak_bytes
        memory = f", with {format_bytes(more_bytes)} more memory" if more_bytes > 0 else ""
        return f"{words} is as fast as the chosen plan{memory}."
    sign = 1.0 if change > 0 else -1.0
    causes = sorted(((sign * by_s, name) for name, by_s in comparison.difference_s.items()), reverse=True)
    main_s = causes[0][0]
    named = [f"{format_seconds(main_s)} {'more' if change > 0 else 'less'} {describe_part(causes[0][1])}"]
    if causes[1][0] >= NOTED * main_s:
        named.append(f"{format_seconds(causes[1][0])} {'more' if change > 0 else 'less'} {describe_part(causes[1][1])}")
    opposed = ""
    if -causes[-1][0] >= NOTED * main_s:
        words_of_gain = "it saves" if change > 0 else "it adds"
        opposed = f"; {words_of_gain} {format_seconds(-causes[-1][0])} of {describe_part(causes[-1][1])}"
    verdict = f"{change:.1%} slower" if change > 0 else f"{-change:.1%} faster"
    return f"{words} is {verdict} than the chosen plan ({times}): {' and '.join(named)}{opposed}."


def explain_misfit(words: str, error: DoesNotFitError) -> str:
    """Return the lines about a layout of which no plan fits: the missing memory first."""
    lines = [f"{words}: {error.what}", f"  closest plan: {error.where}", f"  memory: {error.seen}, {error.allowed}"]
    if error.next_step:
        lines.append(f"  try: {error.next_step}")
    return "\n".join(lines)


def comparison_tables(comparison: LayoutComparison) -> list[TextTable]:
    """Return the table of both layouts, and the table of the parts of their steps."""
    chosen, asked = comparison.chosen, comparison.asked
    keys = choice_keys(chosen.decisions, asked.decisions)
    rows = tuple(
        (
            name,
            *choice_cells(figures.decisions, keys),
            format_seconds(figures.step_s),
            f"{format_bytes(figures.peak_bytes)} of {format_bytes(figures.limit_bytes)}",
        )
        for name, figures in (("chosen", chosen), ("asked", asked))
    )
    difference_s = comparison.difference_s
    parts = [(name, chosen.parts_s[name], asked.parts_s[name], difference_s[name]) for name in STEP_PARTS]
    parts = [part for part in parts if part[1] or part[2]]
    parts.append(("step", chosen.step_s, asked.step_s, asked.step_s - chosen.step_s))
    seconds = tuple(
        (name, format_seconds(before_s), format_seconds(after_s), _signed_seconds(by_s, chosen.step_s))
        for name, before_s, after_s, by_s in parts
    )
    return [
        TextTable("layouts", ("plan", *keys, "step", "memory"), rows),
        TextTable("seconds of a step on the busiest lane", ("part", "chosen", "asked", "difference"), seconds),
    ]


def comparison_data(comparison: LayoutComparison) -> dict[str, Any]:
    """Return the comparison as data for JSON, in seconds and bytes."""

    def figures_data(figures: LayoutFigures) -> dict[str, Any]:
        return {
            "decisions": dict(figures.decisions),
            "step_s": figures.step_s,
            "parts_s": dict(figures.parts_s),
            "peak_bytes": figures.peak_bytes,
            "limit_bytes": figures.limit_bytes,
        }

    return {
        "why not": comparison.words,
        "fits": True,
        "cause": explain_difference(comparison),
        "chosen": figures_data(comparison.chosen),
        "asked": figures_data(comparison.asked),
        "difference_s": dict(comparison.difference_s),
    }


def misfit_data(words: str, error: DoesNotFitError) -> dict[str, Any]:
    """Return a layout that does not fit as data for JSON."""
    return {
        "why not": words,
        "fits": False,
        "cause": error.what,
        "closest plan": error.where,
        "needed": error.seen,
        "limit": error.allowed,
        "try": error.next_step,
    }


def _signed_seconds(seconds: float, step_s: float) -> str:
    """Return `+3.10 ms`, `-3.10 ms`, or `0 s` for less than a billionth of the step."""
    if abs(seconds) < 1e-9 * step_s:
        return "0 s"
    return f"{'+' if seconds > 0 else ''}{format_seconds(seconds)}"
