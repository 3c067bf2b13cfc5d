"""The pure core of measuring links, on simulated networks with noise, odd counts and members that die."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from tests.support.profile_toys import Simulated

from pipefit.profile.config import SIZES, TINY
from pipefit.profile.estimate import pair_times
from pipefit.profile.links import LinkSurvey, RoundOutcome, latency_and_bandwidth, survey_pairs
from pipefit.profile.tournament import HostPair, parallel_tournaments, round_robin, shuffle_members, shuffle_rounds


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_everybody_meets_everybody_once_in_disjoint_pairs(count: int) -> None:
    games = round_robin(range(10, 10 + count))
    assert len(games) == (count - 1 if count % 2 == 0 else count)
    met = [tuple(sorted(pair)) for pairs in games for pair in pairs]
    assert sorted(met) == sorted(combinations(range(10, 10 + count), 2))
    for pairs in games:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))


def test_tournaments_of_several_hosts_run_at_the_same_time() -> None:
    games = parallel_tournaments([[0, 1, 2], [3, 4], [5]])
    assert len(games) == 3
    assert sorted(tuple(sorted(p)) for pairs in games for p in pairs) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert round_robin([7]) == []


@pytest.mark.parametrize("count", [2, 5, 16])
def test_repetitions_put_other_pairs_together(count: int) -> None:
    """All pairs in as many rounds of disjoint ones, but hardly ever the same two pairs at the same time."""
    whole = shuffle_members([range(count)])
    part = shuffle_rounds([*round_robin(range(count))[:5], [(0, 1)]])
    for games, least in ((whole, 4), (part, 5)):
        first, second = games(0), games(1)
        assert len(first) == len(second)
        for played in (first, second):
            for pairs in played:
                members = [member for pair in pairs for member in pair]
                assert len(members) == len(set(members))
        met = [sorted(frozenset(pair) for pairs in played for pair in pairs) for played in (first, second)]
        assert sorted(map(sorted, met[0])) == sorted(map(sorted, met[1]))
        if count == 16:
            together = [
                {frozenset((frozenset(p), frozenset(q))) for pairs in played for p in pairs for q in pairs if p != q}
                for played in (first, second)
            ]
            assert len(together[0] & together[1]) * least < 2 * len(together[0])
        assert games(1) == second, "the same for all ranks"


@pytest.mark.parametrize("count", [2, 3, 5, 6])
def test_known_matrices_are_recovered_from_noisy_round_trips(count: int) -> None:
    network = Simulated(count, seed=count)
    found = survey_pairs(round_robin(range(count)), SIZES, 5, network.measure)
    times = pair_times(found.samples, range(count))
    largest = times.sizes_bytes.index(SIZES[-1])
    for a in range(count):
        for b in range(count):
            if a == b:
                assert np.isnan(times.time_s[:, a, b]).all()
                continue
            assert times.time_s[largest, a, b] == pytest.approx(network.time_s(a, b, SIZES[-1]), rel=0.06)
            tiny = (network.time_s(a, b, TINY) + network.time_s(b, a, TINY)) / 2
            assert times.time_s[0, a, b] == pytest.approx(tiny, rel=0.06)
            assert 0 <= times.spread[largest, a, b] < 0.06
            _, bandwidth = latency_and_bandwidth(times.sizes_bytes, times.time_s[:, a, b])
            assert bandwidth == pytest.approx(network.bandwidth[a, b], rel=0.1)
    if count >= 3:
        apart = ~np.eye(count, dtype=bool)
        assert times.repeatability[apart].min() > 0.9, "links of a skewed network differ by more than the noise"


def test_equal_links_that_get_slower_meanwhile_are_called_unrepeatable_not_different() -> None:
    """The order of measuring must not look like the link: a drift ends up in the spread."""
    network = Simulated(7, noise=0.01, drift=0.002)
    network.latency_s[:], network.bandwidth[:] = 1e-5, 1e10
    found = survey_pairs(round_robin(range(7)), (TINY, 2**20), 6, network.measure)
    times = pair_times(found.samples, range(7))
    apart = ~np.eye(7, dtype=bool)
    assert times.repeatability[apart].mean() < 0.3
    assert times.spread[1][apart].min() > 0.1


def test_every_repetition_goes_through_the_jobs_in_another_order() -> None:
    seen: list[tuple[HostPair, int]] = []

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        seen.append((pairs[0], size))
        return RoundOutcome(dict.fromkeys(pairs, 1e-5))

    survey_pairs(round_robin(range(5)), (TINY, 1024), 2, measure)
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:])
    assert seen[:half] != seen[half:]


def test_a_lost_member_is_named_and_what_was_measured_is_kept() -> None:
    network = Simulated(5)
    network.dies = (3, 40)
    looking = LinkSurvey()
    steps: list[tuple[int, int]] = []
    found = survey_pairs(
        round_robin(range(5)),
        (TINY, 2**20),
        3,
        network.measure,
        found=looking,
        after_round=lambda done, total, _: steps.append((done, total)),
    )
    assert found is looking
    assert found.lost == {3: "connection reset"}
    assert steps[-1] == (60, 60) and len(steps) == 60
    before = [sample for sample in found.samples if 3 in (sample.source, sample.target)]
    assert before, "what was measured before the loss is kept"
    others = {(s.source, s.target, s.size_bytes, s.repeat) for s in found.samples if 3 not in (s.source, s.target)}
    assert len(others) == 4 * 3 * 2 * 3, "the four others were measured to the end"
    times = pair_times(found.samples, [0, 1, 2, 4])
    round_trip_s = network.time_s(0, 4, 2**20) + network.time_s(4, 0, TINY)
    tiny_s = network.time_s(0, 4, TINY) + network.time_s(4, 0, TINY)
    assert times.time_s[1, 0, 3] == pytest.approx(round_trip_s - tiny_s / 2, rel=0.06)
