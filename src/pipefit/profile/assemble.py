"""Assemble a cluster from measurements: hosts, device kinds, link classes, rails. Pure; reports links without a
measurement."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipefit.cluster.kinds import OVERLAP
from pipefit.cluster.measured import (
    ClusterMeasurements,
    CollectiveCurve,
    LayerCurve,
    LinkCurve,
    LinkMethod,
    MemoryFact,
    PortSharing,
    RailCurve,
)
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.cost.types import Array
from pipefit.errors import ClusterError
from pipefit.profile.estimate import LinkShape, PairTimes, pair_times
from pipefit.profile.facts import CPU, DeviceRates, ProfileMember
from pipefit.profile.links import LinkSample, latency_and_bandwidth

LINK_CLASS_TOLERANCE = 0.25
"""Hosts whose inner links differ by less than this share belong to one link class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RailNotes:
    """The method by which the links of a rail were measured; see `cluster.measured.LinkMethod`."""

    rounds: int
    full_rounds: int
    repeats: int
    shape: LinkShape | None = None
    "Structure shared by the hosts' links; None if it was not searched for."
    predicts: bool = False
    "Whether unmeasured links are predicted from measured ones."
    held_out_error: float | None = None
    crowded: bool = False
    sharing: PortSharing | None = None


@dataclass(slots=True)
class ProfileFindings:
    """All measurements of one profile, by phase."""

    members: list[ProfileMember]
    inside: list[LinkSample] = field(default_factory=list)
    rails: dict[str, list[LinkSample]] = field(default_factory=dict)
    "By rail, between one rank of each host."
    surveys: dict[str, RailNotes] = field(default_factory=dict)
    "By rail."
    rates: dict[str, DeviceRates] = field(default_factory=dict)
    "By device kind."
    layers: list[LayerCurve] = field(default_factory=list)
    overhead_s: dict[str, Mapping[str, float]] = field(default_factory=dict)
    collectives: list[CollectiveCurve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def host_ranks(members: Sequence[ProfileMember]) -> dict[str, list[int]]:
    """Return the ranks of every host, hosts in the order of their first ranks.

    Raises ClusterError if the ranks of a host are not consecutive, or if a host has several kinds of devices.
    """
    hosts: dict[str, list[int]] = {}
    for member in members:
        hosts.setdefault(member.host, []).append(member.rank)
    for name, ranks in hosts.items():
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise ClusterError(
                "The ranks of one host are not consecutive.",
                where=f"host {name}",
                seen=f"ranks {', '.join(map(str, ranks))}",
                next_step="start one torchrun per host, or give every host its own name in PIPEFIT_HOST",
            )
        kinds = {member.kind for member in members if member.host == name}
        if len(kinds) > 1:
            raise ClusterError(
                "One host has several kinds of devices.",
                where=f"host {name}",
                seen=", ".join(sorted(kinds)),
                next_step="show each launch only devices of one kind, with CUDA_VISIBLE_DEVICES",
            )
    return hosts


def check_same_software(members: Sequence[ProfileMember]) -> None:
    """Raise ClusterError naming a host whose software differs from that of rank 0."""
    first = members[0]
    for member in members:
        for key in ("pipefit", "python", "torch", "cuda"):
            if member.environment.get(key) != first.environment.get(key):
                raise ClusterError(
                    "The hosts run different software.",
                    where=f"host {member.host} (rank {member.rank})",
                    seen=f"{key} {member.environment.get(key) or 'none'}",
                    allowed=f"{key} {first.environment.get(key) or 'none'}, as on host {first.host}",
                    next_step="install the same versions on all hosts",
                )


def assemble_cluster(findings: ProfileFindings, name: str, when: str, seconds: float) -> Cluster:
    """Return the cluster. Raises ClusterError if a link between hosts could not be measured."""
    members = findings.members
    hosts = host_ranks(members)
    kind_names = short_kinds(members)
    provenance = Provenance(
        source="measured", when=when, where=", ".join(hosts), environment=dict(members[0].environment)
    )
    classes, links, link_curves = _link_classes(findings, hosts, kind_names)
    rails, rail_curves = _measured_rails(findings, hosts)
    measured = ClusterMeasurements(
        layers=tuple(findings.layers),
        links=link_curves,
        rails=rail_curves,
        collectives=tuple(findings.collectives),
        overhead_s=dict(findings.overhead_s),
        memory={
            kind_names[m.kind]: MemoryFact(total_bytes=m.total_bytes, process_bytes=m.process_bytes) for m in members
        },
        notes=tuple(findings.notes),
        seconds=round(seconds, 1),
    )
    return Cluster(
        name=name,
        kinds=_device_kinds(findings, kind_names, provenance),
        links=links,
        hosts=tuple(
            Host(name=host, kind=kind_names[members[ranks[0]].kind], devices=len(ranks), link=classes[host])
            for host, ranks in hosts.items()
        ),
        rails=rails,
        provenance=provenance,
        measured=measured,
    )


def short_kinds(members: Sequence[ProfileMember]) -> dict[str, str]:
    """Return the key of each kind in the cluster file: `cpu` for the only kind of processor, else its words joined by
    `-`."""
    kinds = list(dict.fromkeys(member.kind for member in members))
    processors = [kind for kind in kinds if kind.startswith("cpu ")]
    short = {kind: "-".join(kind.replace("NVIDIA", "").split()) or kind for kind in kinds}
    return short | ({processors[0]: "cpu"} if len(processors) == 1 else {})


def _device_kinds(findings: ProfileFindings, names: Mapping[str, str], provenance: Provenance) -> dict[str, DeviceKind]:
    result = {}
    for member in findings.members:
        name = names[member.kind]
        if name in result:
            continue
        rates = findings.rates[name]
        result[name] = DeviceKind(
            name=name,
            memory_bytes=member.total_bytes - member.process_bytes,
            peak_flops_per_s=dict(rates.flops_per_s),
            memory_bandwidth_bytes_per_s=rates.memory_bandwidth_bytes_per_s,
            efficiency=1.0,
            overhead_s=rates.operator_s,
            overlap=0.0 if member.kind.startswith(CPU) else OVERLAP,
            provenance=Provenance(
                source="measured",
                when=provenance.when,
                where=f"{member.kind}: the rate of large matrix products with all {member.local_size} processes of "
                f"{member.host} at work, {member.cores} cores",
            ),
        )
    return result


def _link_classes(
    findings: ProfileFindings, hosts: Mapping[str, Sequence[int]], kinds: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Link], dict[str, LinkCurve]]:
    """Return (class of every host, links, curves). Hosts of one kind with similar links share a class."""
    times = {
        host: pair_times(_samples_among(findings.inside, ranks), ranks)
        for host, ranks in hosts.items()
        if len(ranks) > 1
    }
    for host, link_times in times.items():
        _require_measured(link_times, [f"device {i} of {host}" for i in range(len(hosts[host]))], "inside the host")
    groups: list[tuple[str, list[str]]] = []
    for host, link_times in times.items():
        kind = kinds[findings.members[hosts[host][0]].kind]
        for other_kind, group in groups:
            largest_s = _over_pairs(times[group[0]])[-1]
            if kind == other_kind and abs(_over_pairs(link_times)[-1] - largest_s) < LINK_CLASS_TOLERANCE * largest_s:
                group.append(host)
                break
        else:
            groups.append((kind, [host]))
    classes = dict.fromkeys(hosts, "inside")
    links, curves = {}, {}
    for kind, group in groups:
        alone = sum(group_kind == kind for group_kind, _ in groups) == 1
        name = "inside" if len(groups) == 1 else f"inside-{kind}" if alone else f"inside-{group[0]}"
        classes |= dict.fromkeys(group, name)
        links[name], curves[name] = _link_class([times[host] for host in group])
    return classes, links, curves


def _link_class(each: Sequence[PairTimes]) -> tuple[Link, LinkCurve]:
    time_s = np.median(np.stack([_over_pairs(times) for times in each]), axis=0)
    pairs = np.concatenate([_off_diagonal(times, times.time_s) for times in each], axis=1)
    spread = np.median(np.concatenate([_off_diagonal(times, times.spread) for times in each], axis=1), axis=1)
    same = float(np.median(np.concatenate([_off_diagonal(times, times.repeatability[None])[0] for times in each])))
    latency_s, bandwidth = latency_and_bandwidth(each[0].sizes_bytes, time_s)
    between = (pairs.max(axis=1) - pairs.min(axis=1)) / time_s
    curve = LinkCurve(
        sizes_bytes=each[0].sizes_bytes,
        time_s=_as_floats(time_s),
        spread=_as_floats(spread),
        between_pairs=_as_floats(between),
        pairs=pairs.shape[1],
    )
    return Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, repeatability=same), curve


def _measured_rails(
    findings: ProfileFindings, hosts: Mapping[str, Sequence[int]]
) -> tuple[tuple[Rail, ...], dict[str, RailCurve]]:
    rails, curves = [], {}
    for index, (name, samples) in enumerate(findings.rails.items()):
        ranks = [members[min(index, len(members) - 1)] for members in hosts.values()]
        notes = findings.surveys.get(name)
        shape = notes.shape if notes else None
        times = pair_times(samples, ranks, shape=shape, predict=notes is not None and notes.predicts)
        _require_measured(times, list(hosts), f"on rail {name}")
        rails.append(_fitted_rail(name, times, notes))
        curves[name] = _rail_curve(times, notes)
    return tuple(rails), curves


def _fitted_rail(name: str, times: PairTimes, notes: RailNotes | None) -> Rail:
    count = times.time_s.shape[1]
    fits = {
        (a, b): latency_and_bandwidth(times.sizes_bytes, times.time_s[:, a, b])
        for a, b in itertools.permutations(range(count), 2)
    }
    fastest = max(bandwidth for _, bandwidth in fits.values())
    return Rail(
        name=name,
        latency_s=tuple(tuple(fits.get((a, b), (0.0, 0.0))[0] for b in range(count)) for a in range(count)),
        bandwidth_bytes_per_s=tuple(
            tuple(fits.get((a, b), (0.0, fastest))[1] for b in range(count)) for a in range(count)
        ),
        repeatability=_as_matrix(np.where(np.eye(count, dtype=bool), 1.0, times.repeatability)),
        shared_ports=_shared_ports(notes.sharing if notes else None),
    )


def _rail_curve(times: PairTimes, notes: RailNotes | None) -> RailCurve:
    count = times.time_s.shape[1]
    predicted = tuple(tuple(int(b) for b in np.flatnonzero(row)) for row in times.predicted)
    return RailCurve(
        sizes_bytes=times.sizes_bytes,
        time_s=tuple(_as_matrix(np.nan_to_num(matrix)) for matrix in times.time_s),
        spread=tuple(_as_matrix(np.nan_to_num(matrix)) for matrix in times.spread),
        error=_as_matrix(np.where(np.eye(count, dtype=bool), 0.0, times.error)),
        predicted=predicted if any(predicted) else (),
        method=_link_method(notes, times) if notes else None,
        sharing=notes.sharing if notes else None,
    )


def _link_method(notes: RailNotes, times: PairTimes) -> LinkMethod:
    return LinkMethod(
        rounds=notes.rounds,
        full_rounds=notes.full_rounds,
        repeats=notes.repeats,
        noise=times.noise,
        order_share=times.order_share,
        held_out_error=notes.held_out_error,
        classes=notes.shape.classes if notes.shape else (),
        crowded=notes.crowded,
    )


def _shared_ports(sharing: PortSharing | None) -> bool:
    """Return whether a port limit was found for at least half of the hosts' sending and receiving ports.

    Without a measurement ports count as shared.
    """
    if sharing is None:
        return True
    both = [*sharing.out_shared, *sharing.in_shared]
    return 2 * sum(both) >= len(both)


def _require_measured(times: PairTimes, names: Sequence[str], where: str) -> None:
    count = len(names)
    missing = [
        f"{names[a]} -> {names[b]}"
        for a in range(count)
        for b in range(count)
        if a != b and np.isnan(times.time_s[:, a, b]).any()
    ]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ClusterError(
            f"These links could not be measured: {', '.join(missing[:4])}{more}.",
            where=where,
            next_step="check whether a firewall or a wrong network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) "
            "blocks connections between the hosts",
        )


def _samples_among(samples: Sequence[LinkSample], ranks: Sequence[int]) -> list[LinkSample]:
    inside = set(ranks)
    return [sample for sample in samples if sample.source in inside and sample.target in inside]


def _over_pairs(times: PairTimes) -> Array:
    return np.asarray(np.median(_off_diagonal(times, times.time_s), axis=1))


def _off_diagonal(times: PairTimes, values: Array) -> Array:
    """Return [size, pair] of an array [size, source, target], without the diagonal."""
    apart = ~np.eye(len(times.members), dtype=bool)
    return values[:, apart]


def _as_floats(values: Sequence[float] | Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _as_matrix(values: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(_as_floats(row) for row in values)
