"""The last look at the best plans of a search: with every pipeline at its own pace, and with what transfers share.

The search itself asks the plain simulator, in which every lane has a port of its own and replicas go in step: it is
many times faster, and its bounds are proved for it.
"""

from __future__ import annotations

from dataclasses import replace

from pipefit.cost.contention import with_contention
from pipefit.plan.build import Workbench
from pipefit.plan.outcome import Evaluated, Found
from pipefit.simulate import simulate

LEAST = 5
"""Plans that are looked at again, at least."""


def on_shared_ports(bench: Workbench, found: Found, top: int) -> Found:
    """The best plans simulated with what they share, the best of them first. The others are left out."""
    again = sorted((_contended(bench, one) for one in found.fitting[: max(LEAST, top)]), key=lambda one: one.rank)
    return replace(found, fitting=tuple(again))


def _contended(bench: Workbench, one: Evaluated) -> Evaluated:
    simulation = one.simulation
    costs = with_contention(simulation.costs, simulation.work, bench.network, bench.layers)
    timeline = simulate(simulation.timeline.schedule, costs)
    return replace(one, simulation=replace(simulation, costs=costs, timeline=timeline))
