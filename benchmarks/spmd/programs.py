"""The proof of synthesized programs, simulated: HAP's cluster and models, against baselines by the same prices.

    python -m benchmarks.spmd.programs [--quick] [--only vgg19,...] [--json FILE]

HAP's cluster (arXiv 2401.05965): 2 machines of 8 V100 and 6 of 8 P100, 10.4 Gbit/s between machines. The devices are as
fast as HAP measured them (3.859 and 2.149 TFLOP/s), 32 rows a device: images of 32 x 32, or 128 tokens; one microbatch,
float32. Sides: equal and proportional data parallelism, FSDP with equal and proportional shares, tensor parallelism
inside hosts with data parallelism between them; for the mixture of experts data parallelism with expert parallelism.
All are the search with less allowed (`sides.py`). Beside each result stand the stated bound (proportional shares,
no communication), and what no program of all devices, or of every host, takes less than, at any shares
(`bound.py`).
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from benchmarks.spmd.bound import no_program_below_s
from benchmarks.spmd.sides import Result, best, bound_s, everything, experts_too, fully_sharded, no_rows, rows_only
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.cost.comm.collectives import all_reduce_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.model.registry import parameter_count
from pipefit.plan.assemble.shard_recipes import shard_setting

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
ROWS = 32
"""A device."""
NETWORK_BYTES_PER_S = 10.4e9 / 8
FLOPS_PER_S = {"V100": 3.859e12, "P100": 2.149e12}
MOVED_BYTES_PER_S = {"V100": 900e9, "P100": 732e9}


def hap_cluster(hosts: tuple[int, int] = (2, 6), devices: int = 8) -> Cluster:
    """Machines of fast and of slow devices; inside a machine 9.46 GB/s, HAP's measured all-gather on one box."""
    kinds = {
        name: DeviceKind(
            name=name,
            memory_bytes=16 << 30,
            peak_flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16"), FLOPS_PER_S[name]),
            memory_bandwidth_bytes_per_s=MOVED_BYTES_PER_S[name],
            efficiency=1.0,
            overlap=1.0,
        )
        for name in FLOPS_PER_S
    }
    names = ["V100"] * hosts[0] + ["P100"] * hosts[1]
    count = len(names)
    rail = Rail(
        name="ethernet",
        latency_s=((30e-6,) * count,) * count,
        bandwidth_bytes_per_s=((NETWORK_BYTES_PER_S,) * count,) * count,
    )
    return Cluster(
        name="hap",
        kinds=kinds,
        links={"inside": Link(latency_s=1e-5, bandwidth_bytes_per_s=9.46e9)},
        hosts=tuple(Host(name=f"host{i}", kind=name, devices=devices, link="inside") for i, name in enumerate(names)),
        rails=(rail,),
        provenance=Provenance(source="assumed", where="HAP's measured device and network speeds"),
    )


def load(name: str) -> Any:
    """A file of examples/models as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def full_models() -> Mapping[str, Callable[[], Any]]:
    """HAP's four models; parameters have no numbers where no buffer needs them."""
    import torch

    def light(make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            with torch.device("meta"):
                return make()

        return made

    return {
        "vgg19": light(load("vgg").vgg19),
        "vit-b": light(load("vit").vit_b),
        "bert-base": lambda: load("bert").bert_base(),
        "bert-moe": light(load("bert_moe").bert_moe),
    }


def small_models() -> Mapping[str, Callable[[], Any]]:
    """The same, a few layers each."""
    import torch

    vgg, vit = load("vgg"), load("vit")

    def small_vgg() -> Any:
        with torch.device("meta"):
            return vgg.example(vgg.VGG(10, width=0.25), 10)

    def small_vit() -> Any:
        with torch.device("meta"):
            return vit.example(vit.ViT(10, 32, 8, 256, 8, 1), 32)

    return {"vgg19": small_vgg, "vit-b": small_vit}


def model_rows(name: str, make: Callable[[], Any], hosts: tuple[int, int], devices: int) -> dict[str, Any]:
    """Every side of one model: seconds of a step."""
    from pipefit.model.capture.whole import capture_whole

    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = make()
        model = capture_whole(example)
    network = Network(hap_cluster(hosts, devices))
    count = network.devices

    def setting(group: tuple[int, ...], rows: int, beside: Any = ()) -> Any:
        return shard_setting(model, network, RooflineCosts(), devices=group, rows=rows, tokens=1, precision="float32",
                          microbatches=1, beside=beside)  # fmt: skip

    whole = setting(tuple(range(count)), ROWS * count)
    speeds = [round(FLOPS_PER_S[kind.name] / 1e9) for kind in network.kinds]
    even = (1,) * count

    groups = [tuple(range(i * devices, (i + 1) * devices)) for i in range(sum(hosts))]
    ports = [tuple(group[place] for group in groups) for place in range(devices)]
    gradients = float(parameter_count(model) * 4)
    between_s = all_reduce_s(network, ports, gradients / devices)

    def host(group: tuple[int, ...], part: float) -> Any:
        beside = tuple(other for other in groups if other != group)
        return setting(group, max(devices, round(ROWS * count * part)), beside)

    def in_hosts(allowed: Any, proportional: bool) -> Result | None:
        """A program of every host's devices, rows divided between hosts; gradients summed between hosts."""
        each: list[Result | None] = []
        for group in (groups[0], groups[-1]):
            part = sum(speeds[d] for d in group) / sum(speeds) if proportional else 1 / len(groups)
            each.append(best(model, host(group, part), allowed, (1,) * devices, False, between_s))
        return max(each, key=lambda one: one.step_s) if all(each) else None

    sides: dict[str, Result | None] = {
        "equal data parallelism": best(model, whole, rows_only, even, gathers=False),
        "proportional data parallelism": best(model, whole, rows_only, speeds, gathers=False),
        "FSDP, equal shares": best(model, whole, fully_sharded, even),
        "FSDP, proportional shares": best(model, whole, fully_sharded, speeds),
        "tensor parallelism in hosts, equal rows": in_hosts(no_rows, False),
        "tensor parallelism in hosts, proportional rows": in_hosts(no_rows, True),
    }
    experts = next((m.gate.out_features for m in example.module.modules() if hasattr(m, "gate")), 0)
    if experts:
        sides["equal data parallelism with expert parallelism"] = best(model, whole, experts_too(experts), even, False)
    ways = {"one group": best(model, whole, everything), "a group a host": in_hosts(everything, True)}
    way, found = min(
        ((way, result) for way, result in ways.items() if result), key=lambda one: one[1].step_s, default=("", None)
    )
    seconds = {side: result.step_s if result else None for side, result in sides.items()}
    bound = bound_s(model, whole, speeds)
    slow = host(groups[-1], 1 / len(groups))
    weight = speeds[-1] * count / sum(speeds)
    least = {
        "one group": no_program_below_s(model, whole),
        "a group a host": no_program_below_s(model, slow, weight, between_s / gradients),
    }
    base = seconds["equal data parallelism with expert parallelism" if experts else "equal data parallelism"]
    ours = found.step_s if found else None
    return {
        "model": name,
        "sides_s": seconds,
        "ours_s": ours,
        "ours": way,
        "bound_s": bound,
        "speedup": base / ours if base and ours else None,
        "bound_speedup": base / bound if base else None,
        "of_bound": bound / ours if ours else None,
        "no_program_below_s": least,
        "reachable_of_bound": bound / min(least.values()),
        "of_reachable": min(least.values()) / ours if ours else None,
        "slower_than": [side for side, s in seconds.items() if s is not None and ours and ours > s * (1 + 1e-9)],
        "shares": list(found.shares) if found else None,
        "compute_s": found.compute_s if found else None,
        "reduce_s": found.reduce_s if found else None,
        "program": programs(found) if found else {},
        "processor_s": time.process_time() - started,
    }


def programs(found: Result) -> dict[str, str]:
    """The recipe of every layer that is not like the one before."""
    assert found.found is not None
    texts: dict[str, str] = {}
    for number, link in enumerate(found.found.links):
        text = link.layer_recipe.recipe_text
        if text not in texts.values():
            texts[f"layer {number}"] = text
    return texts


def print_row(row: dict[str, Any]) -> None:
    print(f"\n{row['model']}")
    sides = *row["sides_s"].items(), ("synthesized", row["ours_s"]), ("bound", row["bound_s"])
    least = ((f"no program below, {way}", seconds) for way, seconds in row["no_program_below_s"].items())
    for side, seconds in (*sides, *least):
        text = "does not fit in memory" if seconds is None else f"{seconds * 1e3:9.1f} ms"
        print(f"  {side:48s} {text}")
    if row["speedup"]:
        of, most = row["of_bound"], row["reachable_of_bound"]
        print(f"  {row['speedup']:.2f} x over the base, bound {row['bound_speedup']:.2f} x: {of:.1%} of it")
        if most < 1:
            print(f"  no program reaches more than {most:.1%} of it: ours {row['of_reachable']:.1%} of that")
    for layer, text in row["program"].items():
        print(f"  {layer}: {text}")


def main() -> int:
    parser = benchmark_parser(__doc__, quick="small models on 1 + 1 hosts of 2 devices")
    parser.add_argument("--only", default="", help="models, with commas")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Price all sides of every model."""
    models = small_models() if arguments.quick else full_models()
    wanted = [name for name in models if not arguments.only or name in arguments.only.split(",")]
    hosts, devices = ((1, 1), 2) if arguments.quick else ((2, 6), 8)
    rows = []
    for name in wanted:
        rows.append(model_rows(name, models[name], hosts, devices))
        print_row(rows[-1])
    return Outcome({"rows_a_device": ROWS, "models": rows})


if __name__ == "__main__":
    sys.exit(main())
