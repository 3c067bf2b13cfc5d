"""Who slows whom down: made-up networks with ports and uplinks, in which messages share what they pass through."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.profile_toys import Contended

from pipefit.profile.flood import LOOK, find_flooded
from pipefit.profile.links import RoundOutcome
from pipefit.profile.sharing import (
    build_sharing,
    choose_hubs,
    find_racks,
    measure_crowd,
    measure_ports,
    measure_uplinks,
)
from pipefit.profile.tournament import HostPair, shuffle_members, thin_rounds

SIZE = 2**20


def rates_of(network: Contended) -> dict[HostPair, float]:
    count = range(network.count)
    return {(a, b): network.rate([(a, b)])[a, b] for a in count for b in count if a != b}


@pytest.mark.parametrize("rack", [0, 4])
def test_pairs_that_share_an_uplink_are_noticed(rack: int) -> None:
    network = Contended(16, rack=rack, uplink=1e9)
    found = measure_crowd(shuffle_members([range(16)])(0)[:2], SIZE, network.measure, sample=5)
    assert found.is_disturbed == bool(rack)
    assert len(found.slowdown) == len(found.alone) == 20
    if rack:
        assert max(found.slowdown.values()) == pytest.approx(4, rel=0.5)


def test_one_pair_alone_is_never_a_crowd_and_one_disturbance_makes_none() -> None:
    assert not measure_crowd(shuffle_members([range(3)])(0), SIZE, Contended(3, noise=0.5).measure).is_disturbed
    network = Contended(8)
    calls = []

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        calls.append(pairs)
        found = network.measure(pairs, size)
        slow = 3.0 if len(calls) % 17 == 0 else 1.0
        return RoundOutcome({pair: slow * time_s for pair, time_s in found.round_trip_s.items()})

    assert not measure_crowd(shuffle_members([range(8)])(0), SIZE, measure).is_disturbed


@pytest.mark.parametrize(("count", "rack", "seed"), [(16, 4, 0), (16, 4, 1), (8, 2, 0), (8, 4, 1)])
def test_racks_are_found_by_who_slows_whom_down_though_all_links_differ(count: int, rack: int, seed: int) -> None:
    network = Contended(count, rack=rack, uplink=8e8, spread=0.4, noise=0.03, seed=seed)
    found = measure_crowd(shuffle_members([range(count)])(0), SIZE, network.measure)
    assert found.is_disturbed and found.find_suspects()
    classes = find_racks(range(count), found, SIZE, network.measure)
    assert len({tuple(h for h in classes if classes[h] == label) for label in classes.values()}) == count // rack
    assert all(classes[h] == classes[h - h % rack] for h in classes)


@pytest.mark.parametrize(("count", "rack"), [(12, 3), (16, 4)])
def test_one_rack_among_hosts_that_share_nothing(count: int, rack: int) -> None:
    """Whoever sends to the rack is slowed down as well: that is the rack's way in, not the senders' way out."""
    network = Contended(count, uplink=1e12, spread=0.4, noise=0.03)
    inside = range(count - rack, count)
    network.rack = [1 if h in inside else 2 + h for h in range(count)]
    network.up = network.down = [1e12, 8e8, *[1e12] * count]
    found = measure_crowd(shuffle_members([range(count)])(0), SIZE, network.measure)
    classes = find_racks(range(count), found, SIZE, network.measure)
    assert [h for h in classes if classes[h] == classes[count - 1]] == list(inside)
    names = {h: f"host{h}" for h in range(count)}
    (uplink,) = measure_uplinks(range(count), classes, names, found.alone, SIZE, 2, network.measure)
    assert uplink.hosts == tuple(names[h] for h in inside)
    assert uplink.up_bytes_per_s == pytest.approx(8e8, rel=0.1)
    assert uplink.down_bytes_per_s == pytest.approx(8e8, rel=0.1)


def test_rounds_are_thinned_so_that_one_pair_leaves_a_rack() -> None:
    games = shuffle_members([range(16)])(0)
    classes = {h: h // 4 for h in range(16)}
    thin = thin_rounds(games, 16, classes)
    assert sorted(sorted(pair) for pairs in thin for pair in pairs) == sorted(
        sorted(pair) for pairs in games for pair in pairs
    )
    for pairs in thin:
        leaving = [classes[h] for pair in pairs for h in pair if len({classes[m] for m in pair}) > 1]
        assert len(leaving) == len(set(leaving))
    network = Contended(16, rack=4, uplink=1e9)
    assert not measure_crowd(thin[:6], SIZE, network.measure).is_disturbed
    assert all(len(pairs) <= 3 for pairs in thin_rounds(games, 3))


@pytest.mark.parametrize("port", [1e9, 1e12])
@pytest.mark.parametrize("count", [3, 4, 9])
def test_ports_are_told_from_limits_of_pairs(count: int, port: float) -> None:
    """One GB/s a pair: through a port of as much two messages take twice the time, else each takes its own."""
    network = Contended(count, port=port)
    groups = choose_hubs(range(count), rates_of(network))
    assert sorted(hub.middle for group in groups for hub in group) == list(range(count))
    for group in groups:
        used = [h for hub in group for h in (hub.middle, *hub.ends)]
        assert len(used) == len(set(used))
    assert len(groups) <= 6
    out, into = measure_ports(groups, rates_of(network), SIZE, 3, network.measure)
    for found in (out, into):
        for each in found.values():
            assert each.shared == (port == 1e9)
            assert each.bytes_per_s == pytest.approx(1e9 if port == 1e9 else 2e9, rel=0.1)
    kept = build_sharing(range(count), (out, into), [])
    assert all(kept.out_shared) == (port == 1e9) and len(kept.in_bytes_per_s) == count


def test_one_slow_port_is_found_among_others() -> None:
    network = Contended(8, port=3e9)
    network.port[5] = 5e8
    out, _ = measure_ports(choose_hubs(range(8), rates_of(network)), rates_of(network), SIZE, 3, network.measure)
    assert [h for h, each in out.items() if each.shared] == [5]
    assert out[5].bytes_per_s == pytest.approx(5e8, rel=0.1)


def test_what_short_messages_gain_is_not_ascribed_to_a_port() -> None:
    """A network that lets the first 50 kB of every message through for nothing, and messages of 250 kB."""
    network = Contended(4, port=1e9)

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        return network.measure(pairs, size - 50_000)

    out, into = measure_ports(choose_hubs(range(4), rates_of(network)), rates_of(network), 250_000, 3, measure)
    for each in (*out.values(), *into.values()):
        assert each.shared and each.bytes_per_s == pytest.approx(1e9, rel=0.06)


def test_uplinks_carry_what_is_found() -> None:
    network = Contended(12, rack=4, uplink=1.5e9)
    network.up[1], network.down[1] = 1e12, 1e12
    classes = {h: h // 4 for h in range(12)}
    names = {h: f"host{h}" for h in range(12)}
    found = measure_uplinks(range(12), classes, names, rates_of(network), SIZE, 2, network.measure)
    assert [each.hosts for each in found] == [tuple(f"host{h}" for h in range(r, r + 4)) for r in (0, 8)]
    for each in found:
        assert each.up_bytes_per_s == pytest.approx(1.5e9, rel=0.1)
        assert each.down_bytes_per_s == pytest.approx(1.5e9, rel=0.1)
    small = Contended(12, rack=8, uplink=1.2e9)
    two = measure_uplinks(range(12), {h: h // 8 for h in range(12)}, names, rates_of(small), SIZE, 2, small.measure)
    assert [each.hosts for each in two] == [("host8", "host9", "host10", "host11")], "of two, the smaller is the rack"
    assert two[0].up_bytes_per_s == pytest.approx(1.2e9, rel=0.1)


@pytest.mark.parametrize(
    ("count", "rack", "share"), [(16, 4, 0.6), (16, 4, 0.75), (8, 2, 0.7), (32, 8, 0.7), (12, 4, 0.5)]
)
@pytest.mark.parametrize("one", [False, True])
def test_uplinks_for_more_than_half_of_a_racks_hosts_are_found(count: int, rack: int, share: float, one: bool) -> None:
    """In a tournament half of the hosts send, and nobody is slower; when all send, whose uplink is full is."""
    network = Contended(count, rack=rack, uplink=share * rack * 1e9, noise=0.03)
    if one:
        inside = range(count - rack, count)
        network.rack = [1 if h in inside else 2 + h for h in range(count)]
        network.up = network.down = [1e12, share * rack * 1e9, *[1e12] * count]
    classes = find_flooded(range(count), rates_of(network), SIZE, network.measure)
    last = [h for h in classes if classes[h] == classes[count - 1]]
    assert last == list(range(count - rack, count))
    if not one:
        assert all(classes[h] == classes[h - h % rack] for h in classes) and len({*classes.values()}) == count // rack
    names = {h: f"host{h}" for h in range(count)}
    found = measure_uplinks(range(count), classes, names, rates_of(network), SIZE, 2, network.measure)
    (own,) = (each for each in found if each.hosts == tuple(names[h] for h in last))
    assert own.up_bytes_per_s == pytest.approx(share * rack * 1e9, rel=0.1)
    assert own.down_bytes_per_s == pytest.approx(share * rack * 1e9, rel=0.1)


@pytest.mark.parametrize(
    "network", [Contended(16, noise=0.05, spread=0.4), Contended(16, rack=4, uplink=4e9, noise=0.05)]
)
def test_hosts_that_share_nothing_or_enough_are_in_no_class(network: Contended) -> None:
    calls = []

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        calls.append(sorted(pairs))
        return network.measure(pairs, size)

    assert find_flooded(range(16), rates_of(network), SIZE, measure) == {}
    assert len({tuple(pairs) for pairs in calls}) == LOOK and all(
        {a for a, _ in pairs} == set(range(16)) for pairs in calls
    )


def test_ports_that_do_not_send_and_receive_at_once_are_no_racks() -> None:
    """Half of the rate each way when both are in use: everybody is slower, nobody belongs together."""
    network = Contended(12)

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        return RoundOutcome({pair: 2 * time_s for pair, time_s in network.measure(pairs, size).round_trip_s.items()})

    assert find_flooded(range(12), rates_of(network), SIZE, measure) == {}
    assert find_flooded(range(12), rates_of(network), SIZE, lambda pairs, size: RoundOutcome({})) == {}, (
        "somebody was lost"
    )
