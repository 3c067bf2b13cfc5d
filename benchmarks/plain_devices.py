"""Clusters with plain devices, for inputs of algorithms: kernels reach half of the peak, collectives the full links.

The data sheets of `pipefit/cluster/kinds.py` describe real kernels, and their figures follow published runs. Recorded
instances, and tests that compare a search with all choices, need figures that do not change with them.
"""

from __future__ import annotations

from dataclasses import replace

from pipefit.cluster import Cluster, parse_spec
from pipefit.cluster.types import DeviceKind, Link

MEMORY_GB = {"H200": 141, "H100": 80, "A100-80": 80, "A100-40": 40, "L4": 24, "V100": 16, "V100-32": 32, "T4": 16}
LINK_GB_PER_S = {"H200": 450, "H100": 450, "A100-80": 300, "A100-40": 300, "L4": 32, "V100": 150, "V100-32": 150}


def plain_spec(text: str) -> Cluster:
    """Return the cluster of a short form with plain devices and links. Raises ClusterError."""
    cluster = parse_spec(text)
    kind = cluster.hosts[0].kind
    link = cluster.links["inside"]
    full = Link(latency_s=link.latency_s, bandwidth_bytes_per_s=LINK_GB_PER_S.get(kind, 32) * 1e9)
    return replace(
        cluster, kinds={name: plain_kind(entry) for name, entry in cluster.kinds.items()}, links={"inside": full}
    )


def plain_kind(kind: DeviceKind) -> DeviceKind:
    """Return a kind of the data sheets whose kernels follow the roofline at half of the peak."""
    return replace(
        kind,
        memory_bytes=round(0.92e9 * MEMORY_GB[kind.name]),
        efficiency=0.5,
        product_traffic=None,
        attention_efficiency=None,
        bandwidth_efficiency=1.0,
        overlap=0.8,
    )
