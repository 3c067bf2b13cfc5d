"""The problems of `fit.py`: named cases, random instances, and what others reached on them.

All have the V placement with 2 d stages on d devices. Times are per stage in any unit; memory is counted in chunk
units, what one microbatch keeps on one stage, so that 1F1B holds 2 d of them on its first device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.schedule import ScheduleProblem, uniform_costs, vee_placement

Deltas = tuple[float, float, float]
"""What F, I and W add to the chunk units held."""

TEXTBOOK: Deltas = (1.0, 0.0, -1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scheduling problem of the benchmark."""

    name: str
    devices: int
    microbatches: int
    forward: tuple[float, ...]
    "One time a stage, as are the next two."
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float
    "From any device to another; sending keeps no port busy."
    limit: float
    "Chunk units of every device."
    deltas: Deltas = TEXTBOOK
    best_known: float | None = None
    "Bubble in per cent, of a solver in 45 to 60 s."
    published: float | None = None
    "Bubble in per cent, of the authors' program for the adaptive search."

    def problem(self, placement: Sequence[int] | None = None) -> ScheduleProblem:
        """The problem on the V, or on a placement with as many or half as many stages; then each is two of the V's."""
        lanes = tuple(placement or vee_placement(self.devices))
        per = 2 * self.devices // len(lanes)
        times = [
            [sum(column[per * s : per * (s + 1)]) for s in range(len(lanes))]
            for column in (self.forward, self.input, self.weight)
        ]
        held = tuple(per * delta for delta in self.deltas)
        costs = uniform_costs(
            lanes,
            forward_s=times[0],
            input_s=times[1],
            weight_s=times[2],
            transfer_s=self.transfer,
            held_bytes=(held[0], held[1], held[2]),
        )
        limits = (self.limit,) * self.devices
        return ScheduleProblem(placement=lanes, microbatches=self.microbatches, costs=costs, limit_bytes=limits)

    def means(self) -> tuple[float, float, float, float]:
        """F, I and W averaged over the stages, and the transfer."""
        return (*(float(np.mean(column)) for column in (self.forward, self.input, self.weight)), self.transfer)  # type: ignore[return-value]


def case(
    name: str,
    devices: int,
    microbatches: int,
    limit: float,
    *,
    times: tuple[float, float, float, float] = (28, 28, 20, 4),
    factors: Sequence[float] | None = None,
    last: float = 1.0,
    deltas: Deltas = TEXTBOOK,
    best_known: float | None = None,
    published: float | None = None,
) -> Case:
    """A case in which stage s takes `factors[s]` times F, I and W, the last one `last` times as long again."""
    scale = list(factors or (1.0,) * (2 * devices))
    scale[-1] *= last
    columns = [tuple(time * factor for factor in scale) for time in times[:3]]
    return Case(
        name=name,
        devices=devices,
        microbatches=microbatches,
        forward=columns[0],
        input=columns[1],
        weight=columns[2],
        transfer=times[3],
        limit=limit,
        deltas=deltas,
        best_known=best_known,
        published=published,
    )


BEST_KNOWN = {8: 16.1, 10: 10.1, 12: 5.2, 16: 1.8}
"""Limit -> bubble of a solver in 60 s on d=8, m=16, 28/28/20/4, last stage 1.5x."""
ADAPTIVE = {8: 18.8, 10: 15.7, 12: 10.7, 16: 4.9}
"""The same, of the authors' adaptive search."""


def slow_head(deltas: Deltas = TEXTBOOK, kind: str = "") -> list[Case]:
    """d=8, m=16, 28/28/20/4, the last stage 1.5 times as slow."""
    textbook = deltas == TEXTBOOK
    return [
        case(
            f"d=8 m=16 last x1.5, limit {limit}{kind}",
            8,
            16,
            limit,
            last=1.5,
            deltas=deltas,
            best_known=BEST_KNOWN[limit] if textbook else None,
            published=ADAPTIVE[limit] if textbook else None,
        )
        for limit in BEST_KNOWN
    ]


def many_microbatches(limits: Sequence[int] = (8, 10, 12, 16), microbatches: int = 64) -> list[Case]:
    """d=8, m=64, equal stages: a profile where the steady state of V-Half closes, and one where it does not."""
    return [
        case(f"d=8 m={microbatches} {'/'.join(map(str, times))}, limit {limit}", 8, microbatches, limit, times=times)
        for times in ((28, 28, 20, 4), (20, 30, 10, 2))
        for limit in limits
    ]


def many_devices(limits: Sequence[int] = (16, 20, 24, 32)) -> list[Case]:
    """d=16, m=48, the last stage 1.5 times as slow."""
    return [case(f"d=16 m=48 last x1.5, limit {limit}", 16, 48, limit, last=1.5) for limit in limits]


SEEDS = range(1, 41)
"""Of the random instances."""
SIGMA = 0.3


def random_instance(seed: int, most: int = 16) -> Case:
    """d from 4 to `most`, m = 2 d, stages lognormal around 28/28/20, the last one 1.5 times as slow, transfer 4; the
    limit anywhere from the fewest chunk units that a V-Min of equal stages needs, less a fifth, to 1F1B's 2 d."""
    draw = random.Random(seed)
    devices = draw.randint(4, most)
    least = math.floor(0.8 * 2 * ((devices + 4) // 3))
    limit = draw.randint(least, 2 * devices)
    factors = [math.exp(draw.gauss(0.0, SIGMA)) for _ in range(2 * devices)]
    name = f"seed {seed}: d={devices} m={2 * devices}, limit {limit} of {2 * devices}"
    return case(name, devices, 2 * devices, limit, factors=factors, last=1.5)


def runtime_deltas(model: str, tokens: int) -> dict[str, Deltas]:
    """What F, I and W of our runtime add for one transformer layer of a model, in what F of it keeps; by recomputation.

    From the rules that the cost tables are made of: F keeps `after_forward` bytes, I leaves `after_input_gradient`
    (inputs and gradients of what holds parameters), W frees them.
    """
    from pipefit.model.analysis.saved import saved_bytes
    from pipefit.model.registry import open_model

    opened = open_model(model)
    layers = [layer for layer in opened.layers if layer.name.startswith("layers.")]
    graph = opened.layer_graph(layers[len(layers) // 2])
    found: dict[str, Deltas] = {}
    for recompute in ("none", "selective"):
        saved = saved_bytes(graph, {"B": 1, "T": tokens}, 2, recompute)  # type: ignore[arg-type]
        pending = round(saved.after_input_gradient / saved.after_forward, 3)
        found[recompute] = (1.0, round(pending - 1.0, 3), -pending)
    return found
