"""Conformance suites for plug-ins: the checks of built-in schedule families, operators and optimizers, as functions.

A check raises AssertionError that names the failed requirement. The suites need neither pytest nor hypothesis. Checks
of operators and optimizers need torch: import them from `pipefit.testing.operators` and `pipefit.testing.optimizers`.
"""

from pipefit.testing.schedules import (
    check_family_facts,
    check_family_fields,
    check_family_graphs,
    check_family_orders,
    check_family_placements,
    check_family_text,
    check_family_times,
    check_schedule_family,
    temporary_family,
)

__all__ = [
    "check_family_facts",
    "check_family_fields",
    "check_family_graphs",
    "check_family_orders",
    "check_family_placements",
    "check_family_text",
    "check_family_times",
    "check_schedule_family",
    "temporary_family",
]
