"""Balancing and ordering, apart and together, against random order, at the settings that DistTrain's follow-ups use.

A pipeline of `stages`, the first an encoder whose samples are lognormal and take `ratio` of a language stage on
average; `replicas` of it, `microbatches` of `rows` samples each; backwards take twice the forwards, transfers nothing.
Simulated: the arrangement is that of a run (`data.multimodal.step`), the time that of the plan's own task graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipefit.data.multimodal.loads import block_of, forward_ns
from pipefit.data.multimodal.ordering import PipelineTimes
from pipefit.data.multimodal.planning import rows_of_samples
from pipefit.data.multimodal.step import multimodal_step
from pipefit.data.stepplan import BatchShape
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.plan.types import SampleArrangement, SampleLoad

WAYS = {"random": (False, False), "balanced": (True, False), "ordered": (False, True), "both": (True, True)}
"""Name -> (balance, order)."""

TARGETS = {"balanced": 1.07, "ordered": 1.03, "both": 1.12}
"""Asked for: gains over random order."""

SETTINGS = (
    {"replicas": 8, "stages": 4, "microbatches": 16, "rows": 1, "sigma": 1.0, "ratio": 0.8},
    {"replicas": 8, "stages": 4, "microbatches": 16, "rows": 2, "sigma": 1.0, "ratio": 0.8},
    {"replicas": 8, "stages": 4, "microbatches": 16, "rows": 4, "sigma": 1.0, "ratio": 0.8},
)
"""Of section 6 of the notes on DistTrain: the last three lines of its simulation."""

MEAN = 1000
"""Tokens of an average sample's images."""


def simulated_gains(setting: dict[str, Any], batches: int = 8, seed: int = 1) -> dict[str, float]:
    """How many times as fast each way is as random order, by the mean step over `batches`."""
    generator, times = np.random.default_rng(seed), dict.fromkeys(WAYS, 0.0)
    count = setting["replicas"] * setting["microbatches"] * setting["rows"]
    sigma = setting["sigma"]
    for _ in range(batches):
        tokens = np.rint(MEAN * generator.lognormal(-sigma * sigma / 2, sigma, (1, count))).astype(np.int64)
        samples = SampledBatches(tokens={"patches": tokens}, squares={"patches": tokens}, note="drawn")
        for way, (balance, order) in WAYS.items():
            times[way] += step_ns(setting, samples, balance, order)
    return {way: times["random"] / one for way, one in times.items() if way != "random"}


def step_ns(setting: dict[str, Any], samples: SampledBatches, balance: bool, order: bool) -> float:
    """One step: the slowest of the replicas' pipelines, which meet nowhere."""
    loads = (
        SampleLoad(space="patches", token_s=setting["ratio"] / MEAN, backward=2.0),
        *(SampleLoad(space="samples", row_s=1.0, backward=2.0) for _ in range(setting["stages"] - 1)),
    )
    size = samples.tokens["patches"].shape[1]
    shape = BatchShape(
        batch=size,
        seed=0,
        microbatches=setting["microbatches"],
        slices=((0, 1),),
        shares=((1,) * setting["replicas"],) * setting["stages"],
        multiples=(1,) * setting["stages"],
        arranging=SampleArrangement(loads=loads, balance=balance, order=order),
    )
    rows = rows_of_samples(samples, 0)
    chosen = multimodal_step(shape, rows, 0).rows
    block = block_of(shape)
    each = [forward_ns(load, rows, chosen).reshape(block.blocks, block.rows) for load in loads]
    pipeline = PipelineTimes(setting["stages"], setting["microbatches"])
    found = []
    for one in sorted({*block.component.tolist()}):
        forward = np.stack([times[:, block.component == one].sum(axis=1) for times in each])
        found.append(pipeline.makespan_ns(forward, 2 * forward))
    return max(found)
