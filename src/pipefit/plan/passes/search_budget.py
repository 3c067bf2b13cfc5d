"""The work that the layout search may spend.

Work is counted in actions of the orders built and in simulations, never in seconds. So a search ends at the same
candidate on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """Budgets and weights of the layout search (`plan/passes/search.py`)."""

    alternative_simulations: int = 24
    "Simulations spent on exact alternatives after the best plan is known."
    order_actions: int = 100_000
    "Work on either kind of schedules before the search stops without a proof. Only large clusters reach it."
    sliced_actions: int = 40_000
    "Work on sliced candidates. Each faster candidate renews it: the best estimate comes first."
    full_slicing_devices: int = 128
    "On more devices than this, with a stage's shards counted as one, the work on slices shrinks in proportion."
    scaling_devices: int = 2048
    "On more devices than this, all work grows in proportion: an evaluation costs more there."
    mixed_kinds_factor: float = 0.5
    "Part of the work that a search on several device kinds spends. Such a search lists more candidates."
    infeasible_actions: int = 200_000
    "Work after which a search without any fitting plan stops."
    first_fit_actions: int = 50_000
    "Work after the first plan that fits, which often comes late and is seldom the best."
    actions_per_table_device: float = 1.0
    "Work of one device of a cost table."
    actions_per_cut: float = 2.0
    "Work of a cut, whatever its stages."
    actions_per_cut_stage: float = 0.5
    "Work of one stage of a cut."
    order_fraction: int = 4
    "An order alone costs one over this of an order and its simulation."
    leaner_cuts: int = 3
    "Cuts of a candidate's layers after the simulator measured more memory than the closed form."
    rearranged_plans: int = 2
    "On several device kinds: plans whose kinds are rearranged."
    rearranging_simulations: int = 24
    "Simulations for each of these plans."
    exact_misfits: int = 16
    "Infeasible candidates whose minimum memory is computed exactly."
    feasibility_simulations: int = 64
    "Simulations spent on the question whether any plan fits."
    steady_state_factor: int = 2
    """A step with this many times the microbatches in which its memory peaks is estimated from those before it is
    simulated."""
    estimate_margin: float = 0.005
    "Candidates with an estimate above the best step by this fraction are not simulated."

    def cut_actions(self, stages: int) -> float:
        """Return the work of a cut into this many stages."""
        return self.actions_per_cut + self.actions_per_cut_stage * stages
