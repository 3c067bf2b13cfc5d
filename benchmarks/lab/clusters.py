"""The emulated clusters of the benchmarks, as they stand in benchmarks/data/clusters: written before anything is run.

    python -m benchmarks.lab.clusters        write the files again (a test compares them)

Small figures, so that 8 to 32 processes on two cores keep to their pace: links of a few MB/s for messages of 64 KB
stand for links of tens of Gbit/s and a large model's messages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.lab.runs import CLUSTERS
from pipefit.cluster import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.codec import dump_text
from pipefit.lab.spec import HostPort, LabFile, RackUplink
from pipefit.lab.tables import DeviceTable

INSIDE = 60e6
SLOW, QUICK = 2e6, 5e6
"""25 and 10 Gbit/s, scaled."""

TOGETHER = 20e6
"""Of hosts whose devices run programs together."""

NEAR, BETWEEN = 40e6, 1e6
"""Inside an island and between two: 400 and 10 Gbit/s, scaled."""

FLOPS = 1.0e9
MB = 10**6

MODULES_FLOPS, MODULES_MB = 0.1e9, 10
MODULES_INSIDE, MODULES_BETWEEN = 20e6, 13.5e6
"""Of the devices for several modules: slow enough that their small layers keep to the pace, and that collectives of all
of them at once are a small part of what two cores can do in that time."""

MODULES_ACTION_S, ONE_HOST_ACTION_S, ONE_HOST_LAYER_S = 10e-3, 40e-3, 2e-3
"""Once an action, and once a layer, of such devices. The backward of a frozen stage, or of a microbatch without images,
is hardly more than its bookkeeping, which all processes do at the same time."""

MODULES_KNEE = 8.0
"""Tokens at which their rate is half of the peak."""

ONE_HOST_FLOPS, ONE_HOST_INSIDE = 0.4e9, 3e6
"""Of a host whose devices' links are slow beside what they compute, as PCIe is beside NVLink."""

MANY_FLOPS, MANY = 0.1e9, 10e6
"""Of 32 devices for the arrangement of samples, and between their hosts: slow enough that two cores do the real work
of all of them within a small part of the time."""

MANY_KNEE = 1.0
"""An image has few tokens here and thousands elsewhere: what it takes is to be in proportion to them."""

RATES = (3e6, 6e6, 12e6, 18e6)
SLOW_PORT = 2e6
"""Of clusters that are drawn: around what each ordered pair of hosts has, and the port of host 1."""

MIXED_LINKS = (
    (0.0, 8e6, 3e6, 2.5e6),
    (7e6, 0.0, 2e6, 3.5e6),
    (3e6, 2.5e6, 0.0, 6e6),
    (2e6, 3e6, 5e6, 0.0),
)
MIXED_BOTH = (
    (0.0, 7e6, 4e6, 3e6),
    (7e6, 0.0, 3e6, 2.5e6),
    (3.5e6, 3e6, 0.0, 5e6),
    (3e6, 2e6, 5e6, 0.0),
)


def drawn(name: str, count: int, devices: int, seed: int, where: str) -> Cluster:
    """`count` hosts of some `devices`, every ordered pair with a rate of its own; `where`: what it was drawn for."""
    draw = random.Random(seed)
    matrix = tuple(
        tuple(round(draw.choice(RATES) * draw.uniform(0.8, 1.2)) if a != b else 0.0 for b in range(count))
        for a in range(count)
    )
    kind = DeviceKind(
        name="small",
        memory_bytes=1 << 30,
        peak_flops_per_s={"float64": 1e9, "float32": 1e9, "bfloat16": 1e9},
        memory_bandwidth_bytes_per_s=1e9,
    )
    return Cluster(
        name=f"{name}-{count}",
        kinds={"small": kind},
        links={"inside": Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8)},
        hosts=tuple(Host(name=f"host{h}", kind="small", devices=devices, link="inside") for h in range(count)),
        rails=(Rail(name="network", latency_s=((0.0,) * count,) * count, bandwidth_bytes_per_s=matrix),),
        provenance=Provenance(source="assumed", where=where),
    )


def clusters() -> dict[str, LabFile]:
    """By the name of its file."""
    even = [[6e6 if a != b else 0.0 for b in range(4)] for a in range(4)]
    return {
        "pair": lab("pair", ["fast"] * 2, [row[:2] for row in even[:2]], {"fast": 2 * FLOPS}),
        "uniform": lab("uniform", ["fast"] * 4, even, {"fast": FLOPS}),
        "mixed-links": lab(
            "mixed-links", ["fast"] * 4, MIXED_LINKS, {"fast": FLOPS},
            ports={"host1": HostPort(send_bytes_per_s=4e6, receive_bytes_per_s=4e6)},
        ),
        "mixed": lab(
            "mixed", ["fast", "slow", "fast", "slow"], MIXED_BOTH, {"fast": 1.2 * FLOPS, "slow": 0.6 * FLOPS},
            uplinks=(
                RackUplink(name="left", hosts=("host0", "host1"), up_bytes_per_s=4.5e6, down_bytes_per_s=4.5e6),
                RackUplink(name="right", hosts=("host2", "host3"), up_bytes_per_s=4.5e6, down_bytes_per_s=4.5e6),
            ),
        ),
    } | {
        "islands": islands(),
        "half-2.5": half("half-2.5", 2.5, skewed(4)),
        "half-1.8": half("half-1.8", 1.8, skewed(4)),
        "links-only": lab("links-only", ["fast"] * 4, skewed(4), {"fast": FLOPS}),
        "tight": half("tight", 2.5, skewed(4), memory_bytes={"fast": 10 * MB, "slow": 6 * MB}),
        "half-2.5-16": half("half-2.5-16", 2.5, skewed(8), slow_flops_per_s=0.25 * FLOPS),
        "half-2.5-32": half(
            "half-2.5-32", 2.5, skewed(16), slow_flops_per_s=0.125 * FLOPS,
            memory_bytes={"fast": 8 * MB, "slow": 5 * MB},
        ),
        "modules-slower": modules("modules-slower"),
        "one-host": one_host(),
        "many": many(),
        "half-3": half("half-3", 3.0, even_links(2), slow_flops_per_s=0.6 * FLOPS),
        "half-3-8": half("half-3-8", 3.0, even_links(4), slow_flops_per_s=0.4 * FLOPS),
    }  # fmt: skip


def even_links(hosts: int) -> list[list[float]]:
    """All hosts reach each other alike, and fast enough that a group of all devices may share its layers."""
    return [[0.0 if a == b else TOGETHER for b in range(hosts)] for a in range(hosts)]


def modules(name: str) -> LabFile:
    """Eight devices alike, in two hosts whose links inside are half as quick again as those between them. Beside the
    64 MiB that the planner keeps for libraries a device has MODULES_MB. Rates saturate early."""
    matrix = [[0.0 if a == b else MODULES_BETWEEN for b in range(2)] for a in range(2)]
    memory_bytes = {"fast": (64 << 20) + MODULES_MB * MB}
    made = lab(name, ["fast"] * 2, matrix, {"fast": MODULES_FLOPS}, devices=4, memory_bytes=memory_bytes)
    return early(inside(made, MODULES_INSIDE), MODULES_KNEE, action_s=MODULES_ACTION_S)


def one_host() -> LabFile:
    """Eight devices alike in one host."""
    made = lab("one-host", ["fast"], [[0.0]], {"fast": ONE_HOST_FLOPS}, devices=8)
    made = inside(made, ONE_HOST_INSIDE)
    return early(made, MODULES_KNEE, action_s=ONE_HOST_ACTION_S, layer_s=ONE_HOST_LAYER_S)


def many() -> LabFile:
    """Four hosts of eight devices alike."""
    matrix = [[MANY * (a != b) for b in range(4)] for a in range(4)]
    made = lab("many", ["fast"] * 4, matrix, {"fast": MANY_FLOPS}, devices=8)
    return early(made, MANY_KNEE, action_s=MODULES_ACTION_S)


def islands() -> LabFile:
    """Two islands of a fast device and three slow ones, 4:1: quick links inside, slow ones between. Devices whose rate
    saturates early, as that of large ones does against the tokens of a microbatch."""
    matrix = [[0.0 if a == b else NEAR if a // 2 == b // 2 else BETWEEN for b in range(4)] for a in range(4)]
    rates = {"fast": 0.56 * FLOPS, "slow": 0.14 * FLOPS}
    made = lab("islands", ["fast", "slow"] * 2, matrix, rates, devices=(1, 3, 1, 3))
    return early(made, 6.0)


def inside(made: LabFile, bytes_per_s: float) -> LabFile:
    """The same hosts, but their devices reach each other at this rate."""
    links = {"inside": replace(made.cluster.links["inside"], bandwidth_bytes_per_s=bytes_per_s)}
    return replace(made, cluster=replace(made.cluster, links=links))


def early(made: LabFile, knee_tokens: float, **changes: float) -> LabFile:
    """The same devices, but their rates reach their half at so few tokens. `changes`: other figures of their tables."""
    like = {name: replace(one, knee_tokens=knee_tokens, **changes) for name, one in made.devices.items()}  # type: ignore[arg-type]
    return replace(made, devices=like)


def half(
    name: str,
    ratio: float,
    matrix: Sequence[Sequence[float]],
    *,
    slow_flops_per_s: float = 0.5 * FLOPS,
    memory_bytes: Mapping[str, int] | None = None,
) -> LabFile:
    """Every second host's devices are `ratio` times as fast as the others'. More of them are slower in all, so that the
    real work of one step, which is the same, has as long as before."""
    kinds = ["fast" if h % 2 == 0 else "slow" for h in range(len(matrix))]
    rates = {"fast": slow_flops_per_s * ratio, "slow": slow_flops_per_s}
    return lab(name, kinds, matrix, rates, memory_bytes=memory_bytes)


def skewed(hosts: int) -> list[list[float]]:
    """Hosts an odd number of places apart reach each other at 10 Gbit/s, the others at 25 (scaled): in hostname order
    every neighbour is far away."""
    return [[0.0 if a == b else SLOW if (a - b) % 2 else QUICK for b in range(hosts)] for a in range(hosts)]


def lab(
    name: str,
    hosts: Sequence[str],
    matrix: Sequence[Sequence[float]],
    flops_per_s: Mapping[str, float],
    *,
    devices: int | Sequence[int] = 2,
    ports: Mapping[str, HostPort] | None = None,
    uplinks: tuple[RackUplink, ...] = (),
    memory_bytes: Mapping[str, int] | None = None,
) -> LabFile:
    """Hosts of these kinds joined by one network. The planner sees nothing of `devices`' tables, ports and uplinks.
    `memory_bytes` of each kind, where it is to be scarce."""
    count = len(hosts)
    each = [devices] * count if isinstance(devices, int) else devices
    cluster = Cluster(
        name=name,
        kinds={
            kind: DeviceKind(
                name=kind,
                memory_bytes=(memory_bytes or {}).get(kind, 1 << 30),
                peak_flops_per_s={"float64": rate, "float32": rate, "bfloat16": rate},
                memory_bandwidth_bytes_per_s=rate,
            )
            for kind, rate in flops_per_s.items()
        },
        links={"inside": Link(latency_s=1e-5, bandwidth_bytes_per_s=INSIDE)},
        hosts=tuple(Host(name=f"host{h}", kind=kind, devices=each[h], link="inside") for h, kind in enumerate(hosts)),
        rails=(
            Rail(
                name="network",
                latency_s=((0.0,) * count,) * count,
                bandwidth_bytes_per_s=tuple(tuple(map(float, row)) for row in matrix),
            ),
        ),
        provenance=Provenance(source="assumed", where="written for the benchmarks"),
    )
    tables = {
        kind: DeviceTable(
            flops_per_s=rate, memory_bytes_per_s=rate, knee_tokens=24.0 if kind == "fast" else 16.0, jitter=0.01
        )
        for kind, rate in flops_per_s.items()
    }
    return LabFile(cluster=cluster, devices=tables, seed=5, ports=ports or {}, uplinks=uplinks)


if __name__ == "__main__":
    for title, file in clusters().items():
        (CLUSTERS / f"{title}.json").write_text(dump_text(file), encoding="utf-8")
