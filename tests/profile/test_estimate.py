"""Noise, order of measuring and structure told apart: on made-up clusters whose links are known."""

from __future__ import annotations

import numpy as np
import pytest

from pipefit.cost.types import Array
from pipefit.profile.completion import complete_links
from pipefit.profile.config import TINY
from pipefit.profile.effects import EffectTerm, fit_effects
from pipefit.profile.estimate import PairTimes, pair_times, tabulate_samples
from pipefit.profile.links import LinkSample
from pipefit.profile.tournament import shuffle_members

LARGE = 2**20
HOSTS = 16


def samples_of(
    time_s: Array, repeats: int, *, noise: float, order: float = 0.0, drift: float = 0.0, bursts: float = 0.0, seed: int
) -> list[LinkSample]:
    """What a tournament gives: every round has a lognormal factor of its own (`order`) and all get slower (`drift`, by
    the end); each measurement has noise, and some (`bursts`) are three times as slow."""
    draw = np.random.default_rng(seed)
    result, job = [], 0
    games = shuffle_members([range(len(time_s))], seed)
    total = repeats * len(games(0)) * 2
    for repeat in range(repeats):
        for pairs in games(repeat):
            for turned in (False, True):
                moment = np.exp(draw.normal(0, order)) * (1 + drift * job / total)
                for pair in pairs:
                    a, b = pair[::-1] if turned else pair
                    disturbed = 3.0 if draw.random() < bursts else 1.0
                    taken = time_s[a, b] * moment * disturbed * np.exp(draw.normal(0, noise))
                    for size, whole in ((TINY, 2e-6), (LARGE, taken + 1e-6)):
                        result.append(
                            LinkSample(
                                source=a, target=b, size_bytes=size, round_trip_s=whole, repeat=repeat,
                                job=job if size == LARGE else -1,
                            )
                        )  # fmt: skip
                job += 1
    return result


def errors(found: Array, truth: Array) -> Array:
    """Of the differences between links: relative, the common factor left out."""
    apart = ~np.eye(len(truth), dtype=bool)
    away = np.log(found[apart]) - np.log(truth[apart])
    return np.asarray(away - away.mean())


def plain(samples: list[LinkSample], count: int) -> Array:
    """The mean of the repetitions of every link."""
    total, number = np.zeros((count, count)), np.zeros((count, count))
    for sample in samples:
        if sample.size_bytes == LARGE:
            total[sample.source, sample.target] += sample.round_trip_s - 1e-6
            number[sample.source, sample.target] += 1
    return np.asarray(total / np.maximum(number, 1))


def estimated(samples: list[LinkSample], count: int) -> PairTimes:
    return pair_times(samples, range(count))


@pytest.mark.parametrize(
    ("links", "order", "drift", "bursts", "gain"),
    [
        (0.0, 0.03, 0.0, 0.0, 5.0),
        (0.0, 0.0, 0.3, 0.0, 5.0),
        (0.03, 0.03, 0.0, 0.0, 1.4),
        (0.01, 0.05, 0.1, 0.0, 3.0),
        (0.3, 0.03, 0.0, 0.05, 2.0),
    ],
)
def test_the_estimate_beats_the_plain_mean_by_a_margin(
    links: float, order: float, drift: float, bursts: float, gain: float
) -> None:
    """Root mean square error of the plain mean over that of the estimate: at least `gain`."""
    draw = np.random.default_rng(5)
    truth = 0.01 * np.exp(draw.normal(0, links, (HOSTS, HOSTS)))
    samples = samples_of(truth, 3, noise=0.02, order=order, drift=drift, bursts=bursts, seed=7)
    ours = errors(estimated(samples, HOSTS).time_s[-1], truth)
    assert gain * np.std(ours) < np.std(errors(plain(samples, HOSTS), truth))


@pytest.mark.parametrize("count", [3, 5, 8, 16, 32])
def test_a_uniform_cluster_stays_uniform(count: int) -> None:
    truth = np.full((count, count), 0.01)
    for seed in range(4):
        times = estimated(samples_of(truth, 3, noise=0.03, order=0.03, seed=seed), count)
        apart = ~np.eye(count, dtype=bool)
        assert np.std(errors(times.time_s[-1], truth)) < (0.012 if count >= 5 else 0.03)
        assert times.repeatability[apart].mean() < (0.2 if count >= 5 else 0.5)
        assert times.noise == pytest.approx(0.03, rel=0.5 if count > 3 else 0.9)


def test_the_share_of_the_order_is_found() -> None:
    """As in published matrices of a healthy cluster: half of the differences are the order of measuring."""
    draw = np.random.default_rng(1)
    truth = 0.01 * np.exp(draw.normal(0, 0.02, (32, 32)))
    times = estimated(samples_of(truth, 3, noise=0.01, order=0.022, seed=2), 32)
    assert times.order_share == pytest.approx(0.022**2 / (0.02**2 + 0.01**2 + 0.022**2), abs=0.1)
    apart = ~np.eye(32, dtype=bool)
    assert times.repeatability[apart].mean() == pytest.approx(0.02**2 / (0.02**2 + 0.01**2 + 0.022**2), abs=0.12)


def test_the_errors_that_are_claimed_are_those_that_are_made() -> None:
    draw = np.random.default_rng(3)
    truth = 0.01 * np.exp(draw.normal(0, 0.05, (32, 32)))
    times = estimated(samples_of(truth, 2, noise=0.03, seed=4), 32)
    apart = ~np.eye(32, dtype=bool)
    made = errors(times.time_s[-1], truth)
    assert np.mean(times.error[apart]) == pytest.approx(np.std(made), rel=0.15)
    assert not times.predicted.any()


def test_links_that_were_not_measured_come_from_their_hosts_where_that_is_asked() -> None:
    """Fast and slow senders and receivers: a third of the links suffices, and the rest says how far off it may be."""
    draw = np.random.default_rng(6)
    truth = 0.01 * np.exp(draw.normal(0, 0.3, (HOSTS, 1)) + draw.normal(0, 0.3, (1, HOSTS)))
    truth *= np.exp(draw.normal(0, 0.02, truth.shape))
    samples = samples_of(truth, 2, noise=0.01, order=0.02, seed=8)
    met = {frozenset(pair) for pairs in shuffle_members([range(HOSTS)], 8)(0)[:6] for pair in pairs}
    kept = [sample for sample in samples if frozenset((sample.source, sample.target)) in met]
    apart = ~np.eye(HOSTS, dtype=bool)
    without = pair_times(kept, range(HOSTS))
    assert np.isnan(without.time_s[-1][apart]).sum() == 2 * (120 - 48)
    found = complete_links(tabulate_samples(kept, range(HOSTS)).select_size(1))
    times = pair_times(kept, range(HOSTS), shape=found.shape, predict=True)
    assert times.predicted.sum() == 2 * (120 - 48)
    made = np.abs(np.log(times.time_s[-1] / truth))
    assert made[times.predicted].mean() < 0.04
    assert made[apart & ~times.predicted].mean() < 0.015
    claimed = np.sqrt((times.error[times.predicted] ** 2).mean())
    assert claimed == pytest.approx(np.sqrt((made[times.predicted] ** 2).mean()), rel=0.5)
    assert times.repeatability[times.predicted].mean() < times.repeatability[apart & ~times.predicted].mean()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_what_was_measured_once_is_left_as_it_is(count: int) -> None:
    draw = np.random.default_rng(11)
    truth = 0.01 * np.exp(draw.normal(0, 0.5, (count, count)))
    samples = samples_of(truth, 1, noise=0.05, seed=12)
    apart = ~np.eye(count, dtype=bool)
    assert estimated(samples, count).time_s[-1][apart] == pytest.approx(plain(samples, count)[apart], rel=2e-3)


def test_repeatability_cannot_tell_from_too_little() -> None:
    apart = ~np.eye(4, dtype=bool)
    once = pair_times(samples_of(np.full((4, 4), 0.01), 1, noise=0.1, seed=0), range(4))
    assert once.repeatability[apart].tolist() == [1.0] * 12
    two = pair_times(samples_of(np.full((2, 2), 0.01), 3, noise=0.1, seed=0), range(2))
    assert two.repeatability.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_variances_of_crossed_groups_are_recovered() -> None:
    draw = np.random.default_rng(9)
    rows, columns = (index.ravel() for index in np.indices((60, 50)))
    row, column = draw.normal(0, 2.0, 60), draw.normal(0, 0.5, 50)
    values = 3 + row[rows] + column[columns] + draw.normal(0, 1.0, 3000)
    found = fit_effects(
        values,
        [EffectTerm("row", rows, 60), EffectTerm("column", columns, 50), EffectTerm("each", np.arange(3000), 3000)],
    )
    assert found.effects["row"].variance == pytest.approx(np.var(row), rel=0.1)
    assert found.effects["column"].variance == pytest.approx(np.var(column), rel=0.25)
    assert found.noise + found.effects["each"].variance == pytest.approx(1.0, rel=0.1)
    assert np.corrcoef(found.effects["row"].value, row)[0, 1] > 0.99
