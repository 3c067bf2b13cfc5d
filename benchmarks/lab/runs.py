"""Labs of the benchmarks: clusters from committed files, what profiling finds there, and plans really run there.

    with lab_of("uniform") as lab:                      benchmarks/data/clusters/uniform.json, made and taken down
        cluster = profiled(lab, model, ...)             what the planner may know: `pipefit profile`, run in the lab
        runs = run_plans(lab, plans, model)             every plan, in processes that stay alive between plans

A step's time is from the moment when the first rank begins it, after a barrier, until the last one has the loss.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import earlier_result, keep_others
from pipefit.cluster import Cluster, load_cluster
from pipefit.cost.work import BUCKET_BYTES
from pipefit.errors import PipefitError
from pipefit.lab import launch, lifecycle
from pipefit.lab.lifecycle import Lab
from pipefit.lab.pace import judge_counts
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config, save_model
from pipefit.plan.check.rules import save_plan
from pipefit.plan.types import Plan

CLUSTERS = Path(__file__).parents[1] / "data" / "clusters"
RANKS = Path(__file__).parent / "ranks.py"
TOKENS = 256
"""Of the largest microbatch that layers are profiled at."""

SIZES = (8, 4096, 32_768, 131_072, 262_144)
"""Bytes of the messages that links are profiled with: what the plans here send."""

TRIES = 3
"""Of a profile: other work on the machine can make one invalid."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one plan."""

    step_s: tuple[float, ...]
    valid: bool
    pace: str
    "How the real work kept to its pace, in words."
    trace: tuple[list[tuple[str, float, float, float]], ...]
    "Of every rank, its last step (`ranks.spans`), where it was asked for."
    peak_bytes: tuple[int, ...] = ()
    "Of every rank, the most that it had alive, by the allocator's own record; where it was asked for."
    busy_s: tuple[float, ...] = ()
    "Of every rank, what its emulated device computed for in a step, the optimizer's update not counted."

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    def beside(self, predicted_s: float) -> dict[str, Any]:
        """Return the steps beside their prediction, as JSON data."""
        return {
            "measured_s": self.median_s,
            "steps_s": list(self.step_s),
            "predicted_s": predicted_s,
            "error": predicted_s / self.median_s - 1,
            "valid": self.valid,
            "pace": self.pace,
        }


def measured_labs(
    arguments: Namespace,
    labs: Sequence[str],
    measure: Callable[[str], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """The labs that were asked for, measured and shown one by one: all, `--only` one (beside the others of a result
    that stands), or the smallest under `--quick`."""
    found = []
    for name in ("pair",) if arguments.quick else ([arguments.only] if arguments.only else labs):
        found.append(measure(name))
        show(found[-1])
    if not arguments.only:
        return found
    earlier = {lab["lab"]: lab for lab in earlier_result(arguments.json).get("labs", ())}
    return list(keep_others({lab["lab"]: lab for lab in found}, earlier, labs).values())


@contextlib.contextmanager
def lab_of(name: str) -> Iterator[Lab]:
    """The lab of a committed cluster file, for as long as it is needed."""
    lab = Lab.open_lab(CLUSTERS / f"{name}.json")
    with lifecycle.hold_lab(lab):
        yield lab


def small_model(layers: int = 8) -> Model:
    """A Llama of width 64, whose real arithmetic is a small part of what the emulated devices take for it."""
    config = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    described = describe_config(config, "small", "the benchmarks' small model")
    return capture_family(described.family, described.config)


def profiled(
    lab: Lab, model: Model, sequence: int, *, quick: bool = False, also: Sequence[Model] = (), **options: Any
) -> Cluster:
    """What `pipefit profile` measures in a lab, the layers of the models `also` with it; `options` of ProfileConfig.
    Raises PipefitError where the measurement was invalid."""
    task = {
        "layers": True,
        "sequence": sequence,
        "tokens": TOKENS // 2 if quick else TOKENS,
        "layer_rounds": 1,
        "link_rounds": 1 if quick else 2,
        "sizes_bytes": SIZES[::2] if quick else SIZES,
    } | options
    with tempfile.TemporaryDirectory() as name:
        names = [f"model-{place}.json" for place in range(len(also))]
        for other, one in zip(names, also, strict=True):
            save_model(one, Path(name) / other)
        _start(lab, Path(name), "profile", model, task | {"also": names})
        return load_cluster(Path(name) / "cluster.json")


def run_plans(
    lab: Lab,
    plans: Sequence[Plan],
    model: Model,
    *,
    warm: int = 1,
    steps: int = 4,
    trace: bool = False,
    bucket_bytes: Sequence[int] = (),
    count_bytes: bool = False,
    samples: Path | None = None,
) -> list[Measured]:
    """Steps of every plan. Plans on the same devices share their processes. `bucket_bytes` of each plan: gradients that
    are reduced together; as `pipefit train` does it where it is not given. `count_bytes`: what every rank has alive,
    too, from one more step and an evaluation that are not timed. `samples`: the index of a multimodal model's."""
    found: dict[int, Measured] = {}
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        groups.setdefault(tuple(sorted(plan.used_devices)), []).append(index)
    for devices, members in groups.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for place, index in enumerate(members):
                save_plan(replace(plans[index], cluster=""), folder / f"plan-{place}.json")
            sizes = [bucket_bytes[index] if bucket_bytes else BUCKET_BYTES for index in members]
            task = {
                "plans": len(members), "warm": warm, "steps": steps, "trace": trace, "bucket_bytes": sizes,
                "count_bytes": count_bytes, "index": "" if samples is None else str(samples.resolve()),
            }  # fmt: skip
            _start(lab, folder, "plans", model, task, devices)
            everyone = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        found |= {index: _measured(ranks) for index, ranks in zip(members, everyone, strict=True)}
    return [found[index] for index in range(len(plans))]


def run_again(lab: Lab, plans: Mapping[str, Plan], model: Model, *, tries: int, **options: Any) -> dict[str, Measured]:
    """Run named plans, and those again whose run was invalid, at most `tries` times; `options` of `run_plans`."""
    runs: dict[str, Measured] = {}
    for _ in range(tries):
        left = [name for name in plans if name not in runs or not runs[name].valid]
        runs |= dict(zip(left, run_plans(lab, [plans[name] for name in left], model, **options), strict=True))
    return runs


def _measured(ranks: Sequence[dict[str, Any]]) -> Measured:
    """One plan, from what all of its ranks saw."""
    steps = zip(*(rank["times"] for rank in ranks), strict=True)
    times = [max(stop for _, stop in step) - min(start for start, _ in step) for step in steps]
    counts = [rank["paced"] for rank in ranks if rank["paced"]]
    valid, words = judge_counts(counts) if counts else (True, "")
    peaks = tuple(rank["bytes"] for rank in ranks if rank["bytes"])
    busy_s = tuple(count["emulated_s"] / len(times) for count in counts)
    return Measured(tuple(times), valid, words, tuple(rank["trace"] for rank in ranks), peaks, busy_s)


def _start(lab: Lab, folder: Path, what: str, model: Model, task: dict[str, Any], devices: Sequence[int] = ()) -> None:
    """Run the ranks; PipefitError with their last words where they fail, or where a profile was invalid every time."""
    save_model(model, folder / "model.json")
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    for _ in range(TRIES if what == "profile" else 1):
        said: list[str] = []
        done = launch.run_judged(lab, ["python", str(RANKS), str(folder), what], devices=devices, say=said.append)
        if done.valid:
            break
    if done.code and not (done.code == 2 and not done.valid and what == "plans"):
        seen = "\n".join(said[-12:]) if done.valid else done.pace
        raise PipefitError(f"The lab's {what} failed.", where=str(lab.path), seen=seen)
