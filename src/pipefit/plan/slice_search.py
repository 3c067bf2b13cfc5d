"""The slices of the best plan once more: a local search over their number and their lengths, judged by the simulator.

The search cuts sequences to equal cost and tries few numbers of slices. What its best plan's own schedule, transfers
and memory make of other slicings only the simulator says; here it is asked for a few around that one
(`plan/slicing/refine.py`), with the cut of the layers kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipefit.errors import ScheduleError
from pipefit.plan.build import Workbench
from pipefit.plan.decisions import Decisions
from pipefit.plan.outcome import Evaluated, Found
from pipefit.plan.search import TIE, evaluate
from pipefit.plan.slices import Slicer
from pipefit.plan.slicing.refine import Slices, Value, refine
from pipefit.plan.types import Job

LOOKS, ACTIONS = 24, 60_000
"""Slicings that are simulated at most, and actions of their orders together."""


def sliced_again(bench: Workbench, job: Job, pins: Mapping[str, Any], found: Found) -> Found:
    """What was found, the best plan with other slices before it where some are faster. Slices that are fixed stay, and
    so does their number where that is."""
    pinned = pins.get("slices")
    if not found.fitting or not found.fitting[0].decisions.slices or isinstance(pinned, tuple):
        return found
    best = found.fitting[0]
    looked: dict[Slices, Evaluated] = {best.decisions.slices: best}

    def value(slices: Slices) -> Value:
        if slices not in looked:
            if len(slices) == 1 or (pinned is not None and len(slices) != pinned):
                return float("inf"), float("inf")
            try:
                looked[slices] = _evaluated(bench, job, replace(best.decisions, slices=slices))
            except ScheduleError:
                return float("inf"), float("inf")
        one = looked[slices]
        return (0.0 if one.simulation.fits else max(1.0, one.peak_bytes - one.limit_bytes)), one.step_s

    order = 3 * best.decisions.stage_count * best.decisions.units
    multiple = Slicer(bench.cutter, job, pins).multiple
    most = max(4, min(LOOKS, ACTIONS // order))
    other = looked[refine([best.decisions.slices], value, multiple=multiple, evaluations=most).slices]
    if not other.simulation.fits or other.step_s >= best.step_s * (1 - TIE):
        return found
    return replace(found, fitting=(other, *found.fitting), simulated=found.simulated + len(looked) - 1)


def _evaluated(bench: Workbench, job: Job, decisions: Decisions) -> Evaluated:
    return evaluate(bench, decisions, bench.parts(job, decisions))
