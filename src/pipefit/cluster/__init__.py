"""cluster/: the machines of a run. `load_cluster`, `parse_spec` and `local_cluster` make clusters; `topology` answers
questions about them."""

from __future__ import annotations

from dataclasses import replace

from pipefit.cluster.files import check_cluster, load_cluster, save_cluster_file
from pipefit.cluster.machine import LocalMachine, detect_machine
from pipefit.cluster.spec import local_cluster, looks_like_spec, parse_spec
from pipefit.cluster.topology import device_count, host_index, host_of, kind_of, link_between
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail

LOCAL = "local:"
"""Prefix of this machine's name in a plan: `local:4` for `--local 4`."""

__all__ = [
    "LOCAL",
    "Cluster",
    "DeviceKind",
    "Host",
    "Link",
    "LocalMachine",
    "Provenance",
    "Rail",
    "check_cluster",
    "detect_machine",
    "device_count",
    "host_index",
    "host_of",
    "kind_of",
    "link_between",
    "load_cluster",
    "local_cluster",
    "looks_like_spec",
    "open_cluster",
    "parse_spec",
    "save_cluster_file",
]


def open_cluster(text: str) -> Cluster:
    """Return the cluster for `--cluster TEXT`: a short text such as `8xH100` or `local:4`, `READER:FILE`, otherwise a
    cluster file; with `@FILE` behind it, with the factors of that calibration.

    Raises ClusterError also if all links of a class have impossible values, which indicates mistaken units.
    """
    from pipefit.cluster.calibration import SEPARATOR, calibrate_cluster, load_calibration, split_calibration

    plain, calibration = split_calibration(text)
    if calibration is not None:
        cluster = calibrate_cluster(open_cluster(plain), load_calibration(calibration), text)
        return replace(cluster, name=f"{cluster.name}{SEPARATOR}{calibration.name}")
    if text.startswith(LOCAL) and text.removeprefix(LOCAL).isdigit():
        return local_cluster(int(text.removeprefix(LOCAL)))
    from pipefit.cluster.readers import open_reader_text
    from pipefit.cluster.readers.plausible import check_plausible

    if looks_like_spec(text):
        cluster = parse_spec(text)
    elif (read := open_reader_text(text)) is not None:
        return read  # checked by its reader
    else:
        cluster = load_cluster(text)
    check_plausible(cluster, text)
    return cluster
