"""The links' part of a profile as rank 0 sees it, over made-up networks: what is measured, kept, and said of a loss."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.profile_toys import Contended, members, rates

from pipefit.cluster.types import Cluster
from pipefit.errors import ClusterError
from pipefit.profile import link_phase
from pipefit.profile.assemble import ProfileFindings, assemble_cluster, host_ranks
from pipefit.profile.config import SIZES, ProfileConfig
from pipefit.profile.links import RoundOutcome
from pipefit.profile.partial import PartialFile, load_partial, partial_path
from pipefit.profile.state import ProfileSession
from pipefit.profile.tournament import HostPair


class Board:
    """One rank's board, for all."""

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}

    def gather(self, value: Any, timeout_s: float | None = None) -> dict[int, Any]:
        return {0: value}


class Profile(ProfileSession):
    """A session of `count` hosts that nobody started: one process measures all of them in its imagination."""

    def __init__(self, count: int, output: Path, **options: Any) -> None:
        self.config = ProfileConfig(output=output, **options)
        self.show = lambda what, done, total: None
        self.rank, self.started, self.board = 0, time.monotonic(), Board()  # type: ignore[assignment]
        self.device = None  # type: ignore[assignment]
        self.members = members(count, 1)
        self.hosts = host_ranks(self.members)
        self.found = ProfileFindings(members=self.members, rates={"cpu": rates()})
        self.file = PartialFile(output)


def profile(
    monkeypatch: pytest.MonkeyPatch, network: Contended, output: Path, dies: tuple[int, int] = (-1, 0), **options: Any
) -> tuple[Cluster, Profile]:
    """Measure `network`; `dies` is (host, after so many measurements)."""
    session = Profile(network.count, output, **options)
    calls = [0]

    class Wire:
        most_bytes, bytes_per_s = 2**23, float("inf")

        def __init__(self, board: Any, device: Any) -> None:
            pass

        def measure(self, pairs: Sequence[HostPair], size: int) -> RoundOutcome:
            calls[0] += 1
            lost = {}
            if calls[0] >= dies[1] and any(dies[0] in pair for pair in pairs):
                lost = {dies[0]: "no answer for 60 s"}
                session.board.lost |= lost
                pairs = [pair for pair in pairs if dies[0] not in pair]
            found = network.measure(pairs, size)
            return RoundOutcome({pair: 1e-5 + time_s for pair, time_s in found.round_trip_s.items()}, lost)

    monkeypatch.setattr(link_phase, "LinkEndpoint", Wire)
    link_phase.measure_links(session)
    return assemble_cluster(session.found, "toy", "2026-01-01T00:00:00+00:00", 1.0), session


def bandwidth_errors(cluster: Cluster, network: Contended) -> np.ndarray:
    alone = {(a, b): network.rate([(a, b)])[a, b] for a in range(network.count) for b in range(network.count) if a != b}
    found = cluster.rails[0].bandwidth_bytes_per_s
    return np.array([abs(found[a][b] / rate - 1) for (a, b), rate in alone.items()])


def test_a_few_hosts_are_measured_in_a_tournament(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = Contended(6, spread=0.4, port=1.5e9)
    cluster, _ = profile(monkeypatch, network, tmp_path / "c.json")
    assert bandwidth_errors(cluster, network).mean() < 0.02
    assert cluster.measured is not None
    curve = cluster.measured.rails["network"]
    assert curve.method is not None and not curve.method.crowded and curve.predicted == ()
    assert (curve.method.rounds, curve.method.full_rounds) == (5, 5)
    assert curve.sizes_bytes == SIZES
    assert cluster.rails[0].shared_ports and curve.sharing is not None and not curve.sharing.uplinks


def test_racks_that_share_an_uplink_are_measured_without_disturbing_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = Contended(8, rack=4, uplink=1e9, pair=8e8)
    cluster, _ = profile(monkeypatch, network, tmp_path / "c.json")
    assert bandwidth_errors(cluster, network).max() < 0.05
    assert cluster.measured is not None
    curve = cluster.measured.rails["network"]
    assert curve.method is not None and curve.method.crowded and 7 < curve.method.rounds <= 28
    assert curve.sharing is not None
    (uplink,) = curve.sharing.uplinks
    assert len(uplink.hosts) == 4 and uplink.up_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert not cluster.rails[0].shared_ports


@pytest.mark.parametrize("uplink", [1e12, 1e9])
def test_many_hosts_take_fewer_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uplink: float) -> None:
    """Three racks of eight, whose way out carries an eighth of what their hosts do."""
    network = Contended(24, rack=8, uplink=uplink)
    cluster, session = profile(monkeypatch, network, tmp_path / "c.json")
    assert bandwidth_errors(cluster, network).mean() < 0.02
    assert cluster.measured is not None
    curve = cluster.measured.rails["network"]
    assert curve.method is not None and curve.sharing is not None
    assert curve.method.crowded == (uplink < 1e12)
    assert sum(map(len, curve.predicted)) > 150
    met = {(sample.source, sample.target) for sample in session.found.rails["network"]}
    assert all((a, b) not in met for a, row in enumerate(curve.predicted) for b in row)
    assert curve.method.held_out_error is not None and curve.method.held_out_error <= 0.03
    assert len(curve.sharing.uplinks) == (3 if uplink < 1e12 else 0)
    for each in curve.sharing.uplinks:
        assert each.up_bytes_per_s == pytest.approx(uplink, rel=0.15)


def test_many_hosts_that_share_what_is_not_to_be_seen_are_measured_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every link has a rate of its own, which hides what they share: one pair at a time remains."""
    network = Contended(20, rack=5, uplink=1e9, spread=0.5)
    cluster, _ = profile(monkeypatch, network, tmp_path / "c.json", host_rounds="all")
    assert bandwidth_errors(cluster, network).max() < 0.05
    assert cluster.measured is not None
    method = cluster.measured.rails["network"].method
    assert method is not None and method.crowded and method.rounds == 190


def test_all_rounds_or_some_on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    everything, _ = profile(monkeypatch, Contended(20), tmp_path / "c.json", host_rounds="all")
    some, _ = profile(monkeypatch, Contended(20), tmp_path / "c.json", host_rounds="5")
    for cluster, rounds, predicted in ((everything, 19, 0), (some, 5, 200)):
        assert cluster.measured is not None
        curve = cluster.measured.rails["network"]
        assert curve.method is not None and curve.method.rounds == rounds
        assert bool(sum(map(len, curve.predicted)) > predicted) == bool(predicted)


@pytest.mark.parametrize("after", [1, 30, 70, 150, 300, 480])
@pytest.mark.parametrize("count", [6, 20])
def test_a_host_that_disappears_at_any_moment_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int, count: int
) -> None:
    """While it is looked who disturbs whom, in the survey, and while ports are measured."""
    output = tmp_path / "c.json"
    with pytest.raises(ClusterError) as caught:
        profile(monkeypatch, Contended(count, rack=2, uplink=1e9), output, (3, after), host_rounds="auto")
    assert "Host host3 failed while measuring: links between hosts, network." in str(caught.value)
    assert "no answer for 60 s" in str(caught.value) and str(partial_path(output)) in str(caught.value)
    kept = load_partial(partial_path(output))
    assert kept.lost == {"3": "no answer for 60 s"}


def test_an_uplink_for_most_of_a_racks_hosts_is_found_and_rounds_stay_wide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only where all four hosts of the rack send are they slower: in few rounds of pairs, and by no two alone."""
    network = Contended(16, noise=0.02)
    network.rack = [1 if h >= 12 else 2 + h for h in range(16)]
    network.up = network.down = [1e12, 0.7 * 4e9, *[1e12] * 16]
    cluster, _ = profile(monkeypatch, network, tmp_path / "c.json", link_rounds=2)
    assert cluster.measured is not None
    curve = cluster.measured.rails["network"]
    assert curve.sharing is not None and curve.method is not None
    ((hosts, up, down),) = [(one.hosts, one.up_bytes_per_s, one.down_bytes_per_s) for one in curve.sharing.uplinks]
    assert hosts == ("host12", "host13", "host14", "host15")
    assert up == pytest.approx(2.8e9, rel=0.1) and down == pytest.approx(2.8e9, rel=0.1)
    assert curve.method.rounds < 60, "not one pair at a time, which takes 120"
    assert bandwidth_errors(cluster, network).mean() < 0.02
