"""Factors on data-sheet figures, fitted to a user's own runs, and the file that `pipefit calibrate` writes.

`8xH100@calibration.json` names the cluster 8xH100 with the factors of that file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipefit.cluster.types import Cluster, DeviceKind, Link
from pipefit.codec import dump_text, load_file, write_file
from pipefit.errors import ClusterError, FormatError

SEPARATOR = "@"
"""Between the text of a cluster and the name of its calibration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFactors:
    """Factors on the figures of one device kind."""

    compute: float = 1.0
    "On the shares of the peak that matrix products and attention reach."
    memory: float = 1.0
    "On the memory bandwidth."


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """One run that factors were fitted to."""

    name: str
    measured_s: float
    "Measured step time."
    data_sheet_s: float
    "Step time predicted from data sheets."
    calibrated_s: float
    "Step time predicted with the factors."
    left_out_s: float | None = None
    "Step time predicted with factors that were fitted to the other runs; None if there are none."


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCalibration:
    """Factors on the data-sheet figures of clusters, and the runs that they were fitted to."""

    format: Literal["pipefit-calibration"] = "pipefit-calibration"
    version: Literal[1] = 1
    devices: Mapping[str, DeviceFactors]
    "By name of the device kind."
    links: float = 1.0
    "On the bandwidth of all links."
    runs: tuple[CalibrationRun, ...] = ()

    def factors(self) -> Iterator[tuple[str, float]]:
        """Yield the place and value of every factor."""
        for kind, factors in self.devices.items():
            yield f"devices.{kind}.compute", factors.compute
            yield f"devices.{kind}.memory", factors.memory
        yield "links", self.links


def load_calibration(path: Path) -> ClusterCalibration:
    """Load a calibration file. Raises FormatError if it is not one, or if a factor is not positive."""
    calibration = load_file(ClusterCalibration, path)
    for field_name, factor in calibration.factors():
        if not 0 < factor < math.inf:
            raise FormatError(
                "A factor of a calibration is a positive number.", where=f"{path}: {field_name}", seen=f"{factor:g}"
            )
    return calibration


def save_calibration(calibration: ClusterCalibration, path: Path) -> None:
    """Write a calibration as JSON. Raises FormatError if the file cannot be written."""
    write_file(path, dump_text(calibration), "calibration", FormatError)


def split_calibration(text: str) -> tuple[str, Path | None]:
    """Return the text of a cluster without its calibration file, and that file. The name of an existing file has
    none."""
    cluster, separator, file = text.rpartition(SEPARATOR)
    if not (separator and cluster and file.endswith(".json")) or Path(text).is_file():
        return text, None
    return cluster, Path(file)


def add_calibration(text: str, path: Path) -> str:
    """Return the text of a cluster with a calibration file. Raises FormatError if it has one already, or if the name of
    the file does not end with .json."""
    if split_calibration(text)[1] is not None:
        raise FormatError("The cluster has a calibration already.", where="--calibration", seen=f"{path} and {text}")
    if path.suffix != ".json":
        raise FormatError("A calibration is a JSON file.", where="--calibration", seen=path, allowed="a name.json")
    return f"{text}{SEPARATOR}{path}"


def calibrate_cluster(cluster: Cluster, calibration: ClusterCalibration, where: str) -> Cluster:
    """Return a cluster from data sheets with the factors of a calibration.

    Raises ClusterError for a measured cluster, and for a kind of device that the calibration does not have.
    """
    if cluster.measured is not None:
        raise ClusterError(
            "A measured cluster takes no calibration: its times were measured.",
            where=where,
            allowed="a short text such as 8xH100, or a cluster file from data sheets",
            next_step="name the cluster without the calibration",
        )
    unknown = sorted({kind.name for kind in cluster.kinds.values()} - calibration.devices.keys())
    if unknown:
        raise ClusterError(
            "The calibration has no factors for a kind of device.",
            where=where,
            seen=", ".join(unknown),
            allowed=", ".join(sorted(calibration.devices)),
            next_step="calibrate with runs on such devices as well, or plan without the calibration",
        )
    return scale_links(
        replace(
            cluster,
            kinds={key: _scale_kind(kind, calibration.devices[kind.name]) for key, kind in cluster.kinds.items()},
        ),
        calibration.links,
    )


def scale_links(cluster: Cluster, bandwidth: float, latency: float = 1.0) -> Cluster:
    """Return a cluster whose links have these multiples of their bandwidth and latency; measured curves stay."""

    def scale_link(link: Link) -> Link:
        return replace(
            link,
            latency_s=link.latency_s * latency,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
        )

    rails = tuple(
        replace(
            rail,
            latency_s=scale_matrix(rail.latency_s, latency),
            bandwidth_bytes_per_s=scale_matrix(rail.bandwidth_bytes_per_s, bandwidth),
        )
        for rail in cluster.rails
    )
    return replace(cluster, links={name: scale_link(link) for name, link in cluster.links.items()}, rails=rails)


def scale_matrix(matrix: Sequence[Sequence[float]], factor: float) -> tuple[tuple[float, ...], ...]:
    """Return the matrix with all entries multiplied by `factor`."""
    return tuple(tuple(entry * factor for entry in row) for row in matrix)


def _scale_kind(kind: DeviceKind, factors: DeviceFactors) -> DeviceKind:
    attention = kind.attention_efficiency
    origin = kind.provenance
    return replace(
        kind,
        efficiency=kind.efficiency * factors.compute,
        attention_efficiency=None if attention is None else attention * factors.compute,
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s * factors.memory,
        provenance=replace(origin, where=f"{origin.where}; speeds corrected by the user's own runs"),
    )
