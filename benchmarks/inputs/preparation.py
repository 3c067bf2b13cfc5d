"""How long does a trainer wait for its images: decoded in its own process, or prepared elsewhere by as many cores?

JPEG images of many sizes with the statistics of photographs (noise whose amplitude falls with its frequency) are made
in a folder for temporary files and indexed. The trainer stands for a device at work: it sleeps for a step and asks for
the next one's images. Steps last FACTORS times what the images of one step take on the cores: below 1 cores cannot
keep up, and what is waited for then is what they lack. Whoever decodes is bound to the same cores, as many as there are
workers or threads: the trainer between two steps (`in_process`), threads of the trainer during the step before
(`ahead`; Pillow decodes without holding the interpreter), and workers (`elsewhere`).

    python -m benchmarks.inputs.preparation --json benchmarks/results/preparation.json
    python -m benchmarks.inputs.preparation --quick
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, make_index, open_index
from pipefit.data.preparation.ahead import BatchRecipe, FeedRequest, HeldStage, StepPrefetcher
from pipefit.data.preparation.cores import MARGIN, image_sizes, measured_rate
from pipefit.data.preparation.start import start_pool
from pipefit.data.stepplan import BatchShape

SEQUENCE = 1152
FACTORS = (0.8, 1.0, MARGIN, 2.0)
MICROBATCHES = 8
PLACES = (HeldStage(0, "patches", 0), HeldStage(1, "samples", 0))
SETTLING = 3
"""Steps at the beginning that do not count: nothing is prepared ahead of the first."""


def main() -> int:
    parser = benchmark_parser(__doc__, quick="few images and steps, one core, two factors")
    parser.add_argument("--cores", type=int, nargs="*", help="core budgets (default: 1, and all of this machine's)")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure every core budget at every step time."""
    quick = arguments.quick
    budgets = arguments.cores or ([1] if quick else sorted({1, len(os.sched_getaffinity(0))}))
    with tempfile.TemporaryDirectory() as folder:
        index = make_images(Path(folder), 16 if quick else 96)
        recipe = BatchRecipe(index=str(index), shape=shape_of(batch=8 if quick else 16))
        opened = open_index(index)
        cpu_s = measured_rate(opened).decode_seconds(*image_sizes(opened)).mean()
        rows = []
        every = sorted(os.sched_getaffinity(0))
        for cores in budgets:
            os.sched_setaffinity(0, every[-cores:])
            work_s = in_process(recipe, cores, steps=4, step_s=0.0)["work_s"]
            for factor in FACTORS[1::2] if quick else FACTORS:
                steps, step_s = 6 if quick else 12, factor * work_s
                sides = {run.__name__: run(recipe, cores, steps, step_s) for run in (in_process, ahead, elsewhere)}
                setting = {"cores": cores, "step_s": step_s, "step_over_work": step_s / sides["in_process"]["work_s"]}
                rows.append(setting | sides)
                print(line(rows[-1]), flush=True)
    images = {"images": opened.summary.images, "of_a_step": recipe.shape.batch, "cpu_ms_each": 1e3 * float(cpu_s)}
    return Outcome({"images": images, "rows": rows})


def make_images(folder: Path, count: int) -> Path:
    """JPEG files of quality 90, lognormal in their number of pixels (about half a million), and their index."""
    from PIL import Image

    generator = np.random.default_rng(0)
    with (folder / "manifest.jsonl").open("w") as manifest:
        for number in range(count):
            side = 720 * generator.lognormal(0, 0.3)
            width, height = (max(64, round(side * shape)) for shape in generator.lognormal(0, 0.2, 2))
            Image.fromarray(photograph(generator, width, height)).save(folder / f"{number}.jpg", quality=90)
            parts = [{"text": "?", "learn": False}, {"image": f"{number}.jpg"}, {"text": "words"}]
            manifest.write(json.dumps({"parts": parts}) + "\n")
    request = IndexRequest(source=str(folder / "manifest.jsonl"), images=ImageRule(), check="header")
    make_index(request, folder / "index")
    return folder / "index"


def photograph(generator: np.random.Generator, width: int, height: int) -> Any:
    """(height, width, 3) uint8: noise whose amplitude falls as one over its frequency, as that of natural images does
    (Field, 1987)."""
    spectrum = np.fft.rfft2(generator.standard_normal((height, width, 3)), axes=(0, 1))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    spectrum /= np.maximum(frequency, 1 / max(width, height))[..., None]
    pixels = np.fft.irfft2(spectrum, s=(height, width), axes=(0, 1))
    return np.clip((pixels - pixels.mean()) / pixels.std() * 50 + 128, 0, 255).astype(np.uint8)


def shape_of(batch: int) -> BatchShape:
    return BatchShape(
        batch=batch,
        seed=0,
        microbatches=MICROBATCHES,
        slices=((0, SEQUENCE),),
        shares=((1,), (1,)),
        multiples=(1, 1),
    )


def in_process(recipe: BatchRecipe, cores: int, steps: int, step_s: float) -> dict[str, Any]:
    """The trainer decodes when it needs the images, on `cores` threads."""
    with ThreadPoolExecutor(cores) as threads:
        asked = asking(recipe, threads)
        waited = stepped(lambda step: [made.result() for made in asked(step)], steps, step_s)
    return waited | {"work_s": waited["median_ms"] / 1e3}


def ahead(recipe: BatchRecipe, cores: int, steps: int, step_s: float) -> dict[str, Any]:
    """Threads of the trainer decode the next step's images during a step."""
    with ThreadPoolExecutor(cores) as threads:
        asked, coming = asking(recipe, threads), dict[int, list[Future[Any]]]()

        def take(step: int) -> None:
            made = coming.pop(step, None) or asked(step)
            coming[step + 1] = asked(step + 1)
            for one in made:
                one.result()

        return stepped(take, steps, step_s)


def asking(recipe: BatchRecipe, threads: ThreadPoolExecutor) -> Callable[[int], list[Future[Any]]]:
    """Has threads of this process make what a step needs."""
    make, plan_of = recipe.open(), StepPrefetcher(recipe, (), None)

    def asked(step: int) -> list[Future[Any]]:
        plan = plan_of.take_step(step).plan
        runs = [(place, plan.batch_run(place.stage, m, 0)) for place in PLACES for m in range(MICROBATCHES)]
        return [threads.submit(make, FeedRequest(p.space, step, plan.rows[a:b], a)) for p, (a, b) in runs]

    return asked


def elsewhere(recipe: BatchRecipe, cores: int, steps: int, step_s: float) -> dict[str, Any]:
    """`cores` workers prepare ahead."""
    pool = start_pool(recipe, cores)
    assert pool is not None
    try:
        prepared = StepPrefetcher(recipe, PLACES, pool)
        return stepped(lambda step: prepared.take_step(step), steps, step_s)
    finally:
        pool.close()


def stepped(take: Callable[[int], Any], steps: int, step_s: float) -> dict[str, Any]:
    """What is waited for when a device works `step_s` between two requests."""
    waits_ms = []
    for step in range(steps + SETTLING):
        began = time.perf_counter()
        take(step)
        waits_ms.append(1e3 * (time.perf_counter() - began))
        time.sleep(step_s)
    counted = sorted(waits_ms[SETTLING:])
    return {
        "first_ms": waits_ms[0],
        "median_ms": statistics.median(counted),
        "mean_ms": statistics.fmean(counted),
        "p90_ms": counted[int(0.9 * (len(counted) - 1))],
        "most_ms": counted[-1],
    }


def line(row: dict[str, Any]) -> str:
    here, before, there = row["in_process"], row["ahead"], row["elsewhere"]
    return (
        f"{row['cores']} cores, steps of {row['step_s']:.3f} s ({row['step_over_work']:.2f} x the work): waits "
        f"{here['median_ms']:.1f} ms in process, {before['median_ms']:.1f} ms a step ahead, "
        f"{there['median_ms']:.2f} ms elsewhere (mean {there['mean_ms']:.1f}, at most {there['most_ms']:.1f})"
    )


if __name__ == "__main__":
    sys.exit(main())
