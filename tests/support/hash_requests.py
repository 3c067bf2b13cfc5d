"""Forty requests for plans, and the hashes of what is planned: the same on every machine (`test_plan_hashes.py`).

    python -m tests.support.hash_requests [--write] [--compensate] [NAME ...]

prints the hashes of all requests or of those named, as JSON; `--write` puts them into plan_hashes.json, for a change
that is meant to change plans; `--compensate` adds numbers as Python 3.12 and later do. The hash of `run` covers the
work of a run. The hash of `plan` covers everything but the wording of notes: decisions, order, predictions to the last
bit, runners-up.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from tests.support.plan_toys import toy_model
from tests.support.three_modules import three_modules

from pipefit.cluster import Cluster, LocalMachine, load_cluster, local_cluster, parse_spec
from pipefit.cluster.measured import ClusterMeasurements, CollectiveCurve
from pipefit.cluster.types import Rail
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.plan.types import Job, Plan
from pipefit.run.verify.record import run_configuration

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parents[1] / "plan" / "plan_hashes.json"
MACHINE = LocalMachine(cores=4, frequency_hz=2.1e9, memory_bytes=16 * 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A plan that is asked for: searched under constraints, or built from decisions."""

    model: str = "toy 6"
    cluster: str = "4xA100-80"
    batch: int = 8
    sequence: int = 64
    precision: str = "float32"
    constraints: tuple[str, ...] = ()
    decisions: Mapping[str, Any] | None = None
    "Where given, nothing is searched."


def built(**decisions: Any) -> dict[str, Any]:
    return decisions


REQUESTS: Mapping[str, Request] = {
    # searched, of models that are captured
    "llama on 8xH100": Request(
        model="tiny-llama",
        cluster="8xH100",
        batch=16,
        precision="bfloat16",
        constraints=("recompute=none", "schedule=1f1b"),
    ),
    "llama on two hosts": Request(
        model="tiny-llama", cluster="2x4xA100-80:200Gbit/s", batch=16, constraints=("schedule=1f1b", "stages=2")
    ),
    "llama local": Request(model="tiny-llama", cluster="local 4", constraints=("stages=2", "microbatches=4")),
    "llama local free": Request(model="tiny-llama", cluster="local 2"),
    "gpt2 on 4xV100": Request(model="tiny-gpt2", cluster="4xV100", constraints=("recompute=none",)),
    "gpt2 zero1": Request(model="tiny-gpt2", cluster="4xA100-40", constraints=("replicas=4", "zero1=true")),
    "gpt2 sliced": Request(
        model="tiny-gpt2", cluster="2xA100-80", constraints=("stages=2", "slices=4", "schedule=1f1b")
    ),
    "mixtral on mixed kinds": Request(
        model="tiny-mixtral",
        cluster="mixed",
        batch=24,
        constraints=("stages=2", "microbatches=4", "recompute=none", "zero1=false"),
    ),
    "mixtral shards": Request(
        model="tiny-mixtral", cluster="2x2xH100:100Gbit/s", constraints=("shards=2", "sharding=megatron-sp")
    ),
    "qwen3 recomputed": Request(
        model="tiny-qwen3", cluster="4xH100", constraints=("recompute=full", "stages=4", "schedule=gpipe")
    ),
    "qwen3 searched shards": Request(
        model="tiny-qwen3", cluster="4xA100-80", constraints=("shards=2", "sharding=searched", "stages=2")
    ),
    "multimodal": Request(model="multimodal-tiny", cluster="4xH100", sequence=128),
    # searched, of models that are plain data
    "toy free": Request(),
    "toy fit": Request(cluster="3xA100-80", constraints=("schedule=fit", "stages=3")),
    "toy fit split in two": Request(cluster="2xA100-80", constraints=("schedule=fit", "placement=0,1,1,0")),
    "toy uneven links": Request(cluster="skewed 6", batch=24, sequence=512, constraints=("stages=3", "mapping=search")),
    "toy uneven links, many hosts": Request(
        model="toy 13", cluster="skewed 16", batch=32, sequence=512, constraints=("stages=8", "schedule=1f1b")
    ),
    "toy measured": Request(cluster="measured 4", batch=12, sequence=256, constraints=("schedule=1f1b",)),
    "toy measured shards": Request(
        cluster="measured 4", batch=12, sequence=256, constraints=("shards=2", "sharding=searched")
    ),
    "toy slices free": Request(cluster="2xA100-80", batch=2, sequence=512, constraints=("stages=2", "slices=8")),
    "toy uneven replicas": Request(cluster="3xA100-80", batch=12, constraints=("replicas=2:1", "schedule=1f1b")),
    "toy mixed kinds": Request(
        cluster="mixed",
        batch=24,
        sequence=256,
        constraints=("stages=3", "microbatches=4", "schedule=1f1b", "recompute=none", "zero1=false"),
    ),
    "toy tied": Request(model="toy tied", cluster="2xV100", constraints=("stages=2", "schedule=zb-h1")),
    "three modules": Request(model="three", cluster="8xA100-80", sequence=4096),
    "three modules disjoint": Request(
        model="three", cluster="4xA100-80", sequence=4096, constraints=("modules=disjoint",)
    ),
    # built from decisions
    "built gpipe": Request(decisions=built(stages=4, microbatches=8, schedule="gpipe")),
    "built 1f1b": Request(model="tiny-llama", decisions=built(stages=4, microbatches=4, recompute=("selective",))),
    "built interleaved": Request(
        cluster="local 2",
        decisions=built(stages=4, placement=(0, 1, 0, 1), microbatches=4, schedule="interleaved-1f1b"),
    ),
    "built zb-h1": Request(cluster="local 4", decisions=built(stages=4, microbatches=8, schedule="zb-h1")),
    "built zb-v": Request(
        cluster="skewed 2", decisions=built(stages=4, placement=(0, 1, 1, 0), microbatches=4, schedule="zb-v")
    ),
    "built v-half": Request(
        model="toy 9",
        cluster="local 4",
        decisions=built(stages=8, placement=(0, 1, 2, 3, 3, 2, 1, 0), microbatches=8, schedule="v-half"),
    ),
    "built v-min": Request(
        model="toy 9", decisions=built(stages=8, placement=(0, 1, 2, 3, 3, 2, 1, 0), microbatches=8, schedule="v-min")
    ),
    "built v-zb": Request(
        model="tiny-qwen3",
        cluster="local 2",
        decisions=built(stages=4, placement=(0, 1, 1, 0), microbatches=4, schedule="v-zb"),
    ),
    "built fit": Request(cluster="3xA100-80", decisions=built(stages=3, microbatches=8, schedule="fit")),
    "built slices": Request(
        model="tiny-llama", cluster="local 2", decisions=built(stages=2, microbatches=2, slices=(32, 20, 12))
    ),
    "built uneven replicas": Request(
        cluster="measured 4", batch=12, decisions=built(stages=2, microbatches=4, replicas=(2, 1), recompute=("full",))
    ),
    "built uneven shards": Request(
        cluster="measured 4", decisions=built(stages=2, microbatches=4, shards=(3, 1), sharding="megatron")
    ),
    "built zero1 and shards": Request(
        cluster="2x4xA100-80:25GB/s",
        decisions=built(
            stages=2,
            microbatches=4,
            replicas=(1, 1),
            shards=(1, 1),
            sharding="megatron-sp",
            sharded_state="optimizer",
            inner="stage",
        ),
    ),
    "built recomputed by stage": Request(
        model="tiny-gpt2",
        cluster="local 4",
        decisions=built(stages=4, microbatches=8, recompute=("full", "selective", "none", "none")),
    ),
    "built on mixed kinds": Request(
        model="tiny-mixtral", cluster="mixed", decisions=built(stages=2, microbatches=2, devices=(7, 8))
    ),
}


@cache
def model_of(name: str) -> Model:
    """`toy N`, another toy, or a built-in model."""
    toys: dict[str, Callable[[], Model]] = {
        "toy tied": lambda: toy_model(6, tied=True), "three": three_modules
    }  # fmt: skip
    if name in toys:
        return toys[name]()
    return toy_model(int(name.removeprefix("toy "))) if name.startswith("toy ") else open_model(name)


def cluster_of(name: str) -> Cluster:
    """A short cluster text, or: `local N` of a machine that is given, `skewed N` hosts, `measured N`, `mixed`."""
    word, _, count = name.partition(" ")
    if word == "local":
        return local_cluster(int(count), MACHINE)
    if word == "skewed":
        return skewed(int(count))
    if word == "measured":
        return measured(int(count))
    return load_cluster(ROOT / "examples" / "clusters" / "mixed-kinds.json") if word == "mixed" else parse_spec(name)


def skewed(hosts: int) -> Cluster:
    """One device a host, no two links alike; all figures made of whole numbers."""
    rail = Rail(
        name="network",
        latency_s=tuple(
            tuple(0.0 if a == b else (11 + (5 * a + 3 * b) % 13) * 1e-6 for b in range(hosts)) for a in range(hosts)
        ),
        bandwidth_bytes_per_s=tuple(
            tuple((31 + (17 * a + 29 * b + a * b) % 83) * 1e6 for b in range(hosts)) for a in range(hosts)
        ),
    )
    return replace(parse_spec(f"{hosts}x1xA100-80:1GB/s"), rails=(rail,))


def measured(devices: int) -> Cluster:
    """With collectives that were measured on several groups."""
    groups = (((0, 1), 1.31, 0.83), ((2, 3), 1.77, 0.91), ((0, 2), 1.13, 1.07), (tuple(range(devices)), 1.9, 0.77))
    curves = tuple(
        CollectiveCurve(
            operation=operation, devices=group, sizes_bytes=(8, 2**24), time_s=(2e-5, 3e-4), spread=(0.0, 0.0),
            latency_factor=latency, bandwidth_factor=bandwidth,
        )
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for group, latency, bandwidth in groups
    )  # fmt: skip
    return replace(parse_spec(f"{devices}xA100-80"), measured=ClusterMeasurements(collectives=curves))


def samples(batch: int) -> SampledBatches:
    """Samples that differ, made of whole numbers."""
    import numpy as np

    rows = np.arange(2 * batch, dtype=np.int64).reshape(2, batch)
    tokens = {space: 300 + rows * prime % 4001 for space, prime in (("patches", 1289), ("latents", 911))}
    return SampledBatches(
        tokens=tokens, squares={space: 100 * table for space, table in tokens.items()}, note="samples: by hand"
    )


def plan_of(request: Request) -> Plan:
    """The plan with its prediction."""
    model, cluster = model_of(request.model), cluster_of(request.cluster)
    job = Job(batch=request.batch, sequence=request.sequence, precision=request.precision)  # type: ignore[arg-type]
    if request.decisions is not None:
        plan = build_plan(model, cluster, job, ParallelConfig(**request.decisions), name=request.model)
        return add_prediction(plan, model, simulate_plan(plan, model, cluster))
    given = samples(request.batch) if request.model == "three" else None
    return make_plan(model, cluster, job, parse_constraints(request.constraints), name=request.model, samples=given)


def without_notes(plan: Plan) -> Plan:
    """Return the plan without the sentences that explain it, which may be worded anew."""
    assert plan.prediction is not None
    prediction = replace(
        plan.prediction,
        binds="",
        assumptions=(),
        sensitivity=tuple(replace(change, change="", how="") for change in plan.prediction.sensitivity),
    )
    alternatives = tuple(replace(alternative, reason="") for alternative in plan.alternatives)
    return replace(plan, prediction=prediction, alternatives=alternatives)


def hashes_of(name: str) -> dict[str, str]:
    """Return the hashes of the plan of a request."""
    plan = plan_of(REQUESTS[name])
    return {"run": run_configuration(plan), "plan": without_notes(plan).content_hash}


def compensated_sum(values: Iterable[Any], /, start: Any = 0) -> Any:
    """Add as `sum` does since Python 3.12: what rounding takes from a sum of floats is added at the end (Neumaier)."""
    total, lost = start, 0.0
    for value in values:
        if type(total) is float and type(value) in (float, int):
            joined = total + value
            lost += (total - joined) + value if abs(total) >= abs(value) else (value - joined) + total
            total = joined
        else:
            total = total + value
    return total + lost if lost and isfinite(lost) else total


def main() -> int:
    words = [word for word in sys.argv[1:] if word not in ("--write", "--compensate")]
    if "--compensate" in sys.argv:
        import_module("torch._dynamo")  # it reads the signature of `sum`

        builtins.sum = compensated_sum
    table = {name: hashes_of(name) for name in words or REQUESTS}
    if "--write" in sys.argv:
        known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        table = {name: (known | table)[name] for name in REQUESTS}
        FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
