"""The tuning constants of fitting: how a search of orders spends its moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBudget:
    """Numbers that tune the fitting of a schedule. Shares are fractions of the moves that remain."""

    moves: int = 100_000
    "Default number of moves of the local search."
    tightenings: int = 8
    "Maximum number of times that limits are tightened because of buffers."
    finishing_factor: float = 2.0
    "Time reserved for the end of the search, in multiples of the time of one merging and simulation."

    safe_searches: int = 12
    "If buffers exceed the limits: the number of searches from the best fitting orders."
    least_safe_moves: int = 500
    "The minimum of moves of each of these searches."

    raced_choices: int = 3
    "Options are chosen between the best choices, at most this number, and the best uniform one."
    choices_share: float = 0.6
    "Share of the moves for choosing options."
    choice_starts: int = 3
    "Number of constructions of each uniform choice that are tried on all other choices."
    choice_moves: int = 600
    "Maximum number of moves with which one choice of options is evaluated."

    tuned_starts: int = 4
    "Number of best starts that are tuned."
    tuning_share: float = 0.06
    "Share of the moves for each of them."

    short_searches: int = 3
    "With many microbatches: the number of searches with few microbatches."
    short_share: float = 0.08
    "Share of the moves for each of them."
    middle_cuts: int = 8
    "Number of cuts in the middle of a short schedule, each with steady states of one to four microbatches."

    racers: int = 8
    "Maximum number of starts that race."
    first_round_moves: int = 1000
    "Moves of a racer in the first round of the first generation, if there are enough."
    least_racer_moves: int = 1000
    "Minimum of moves per racer; with fewer moves there are fewer racers."
    clock_moves: int = 250
    "Moves between two checks of the clock."

    ends_weight: float = 0.02
    "Weight of the sum of the lanes' ends, added to the objective."
    toggle_percent: int = 10
    "Percentage of moves that switch between B and I with W, if B saves time or memory."
    shift_percent: int = 70
    "Percentage of moves that shift one operation."
    run_shift_percent: int = 15
    "Percentage of moves that shift a run. The rest are waves."
    longest_shift: int = 8
    "Maximum number of positions by which one operation is shifted."
    critical_percent: int = 60
    "Percentage of shifts of one operation that start on the critical path."

    first_heat_operations: float = 0.12
    "First heat, in mean operations."
    last_heat_operations: float = 0.008
    "Last heat, in mean operations."
    most_heat_factor: float = 4.0
    "Later generations, with longer runs, begin hotter, at most by this factor."


FIT_BUDGET = FitBudget()
