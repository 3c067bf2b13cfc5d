"""Progress of a search: reports to an observer, and the best plan so far.

Every pass of the planner names itself and counts its work on the tracker of its context. An observer is called with a
report each time; it limits its own output. No plan depends on it. The best plan is kept in case of an
interruption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipefit.plan.evaluate.outcome import EvaluatedPlan

READING = "reading the model"
LAYOUTS = "searching layouts"
CONTEXTS = "splitting sequences"
STATE_GROUPS = "grouping replicas that shard state"
PLACING = "placing devices"
GROUPS = "grouping devices"
TRADE = "trading memory for time"
MODULES = "searching layouts of modules"
BATCHES = "averaging over the batches"
SENSITIVITY = "sensitivity to better hardware"
MISFIT = "changes that would make it fit"

INTERRUPTED = "interrupted: best plan so far, search not finished"
"""The note of a plan whose search was interrupted, among the assumptions of its prediction."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The state of a search."""

    pass_name: str
    left: int | None
    "Candidates left in this pass; None if they are not counted."
    simulated: int
    "Simulations so far, over all passes."
    best_s: float | None
    "Shortest step so far; None before a plan fits."
    bound_s: float | None
    "Lower bound of the step over the candidates listed so far; None before there is one."


SearchObserver = Callable[[SearchReport], None]


class SearchTracker:
    """Counts the work of a search, keeps its best plan, and tells the observer."""

    def __init__(self, observer: SearchObserver | None = None) -> None:
        self.observer = observer
        self.best: EvaluatedPlan | None = None
        "The best plan so far that fits and obeys the constraints."
        self.simulated = 0
        self._pass_name = ""
        self._keeps_plans = True
        self._left: int | None = None
        self._bound_s: float | None = None

    def start_pass(self, name: str, *, keeps_plans: bool = True) -> None:
        """Begin a pass. Without `keeps_plans`, its plans are not results: of another cluster, or other constraints."""
        self._pass_name, self._keeps_plans, self._left = name, keeps_plans, None
        self._tell_observer()

    def count_left(self, left: int) -> None:
        """Set the number of candidates left in this pass."""
        self._left = left
        self._tell_observer()

    def add_bound(self, bound_s: float) -> None:
        """Add the lower bound of more candidates, unless their plans are not results."""
        if self._keeps_plans:
            self._bound_s = bound_s if self._bound_s is None else min(self._bound_s, bound_s)

    def count_plan(self, plan: EvaluatedPlan) -> EvaluatedPlan:
        """Count a simulated plan, and keep it if it is the best; return it."""
        self.simulated += 1
        if (
            self._keeps_plans
            and (self.best is None or plan.step_s < self.best.step_s)
            and plan.simulation.fits_in_memory
        ):
            self.best = plan
        self._tell_observer()
        return plan

    def _tell_observer(self) -> None:
        if self.observer is not None:
            best_s = None if self.best is None else self.best.step_s
            self.observer(SearchReport(self._pass_name, self._left, self.simulated, best_s, self._bound_s))
