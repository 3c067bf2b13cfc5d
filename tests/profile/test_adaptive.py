"""Fewer rounds than a tournament where hosts cluster, all of them where they do not: on made-up clusters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipefit.cost.types import Array
from pipefit.profile.adaptive import AdaptiveSurvey
from pipefit.profile.classes import find_classes, split_values
from pipefit.profile.config import TINY
from pipefit.profile.estimate import PairTimes, pair_times, tabulate_samples
from pipefit.profile.links import LinkSample, LinkSurvey, RoundOutcome, survey_pairs
from pipefit.profile.tournament import HostPair, shuffle_members, shuffle_rounds

LARGE = 2**20
ROOT = Path(__file__).resolve().parents[2]


def network(time_s: Array, noise: float = 0.02, seed: int = 0):  # type: ignore[no-untyped-def]
    """A `measure` over these times, with noise and rounds that are slow as a whole."""
    draw = np.random.default_rng(seed)

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        moment = draw.normal(0, noise)
        exact = (lambda a, b: 1e-6) if size == TINY else (lambda a, b: float(time_s[a, b]))
        return RoundOutcome({(a, b): exact(a, b) * float(np.exp(moment + draw.normal(0, noise))) for a, b in pairs})

    return measure


def surveyed(time_s: Array, **options: object) -> tuple[PairTimes, AdaptiveSurvey, list[LinkSample]]:
    found, chooser, measure = LinkSurvey(), AdaptiveSurvey(range(len(time_s)), **options), network(time_s)  # type: ignore[arg-type]
    batch = 0
    while games := chooser.next_rounds(found.samples):
        for pairs in games:
            members = [member for pair in pairs for member in pair]
            assert len(members) == len(set(members))
        survey_pairs(shuffle_rounds(games, batch), (TINY, LARGE), 2, measure, found=found, seed=batch)
        batch += 1
    times = pair_times(found.samples, range(len(time_s)), shape=chooser.progress.host_shape, predict=True)
    return times, chooser, found.samples


def errors(times: PairTimes, time_s: Array) -> Array:
    apart = ~np.eye(len(time_s), dtype=bool)
    return np.abs(times.time_s[-1] / time_s - 1)[apart]


def racked(count: int, seed: int, own: float = 0.02) -> tuple[Array, Array]:
    """(times, rack of every host): racks of eight with shuffled names, a quarter of the rate between them."""
    draw = np.random.default_rng(seed)
    rack = draw.permutation(np.arange(count) // 8)
    nominal = np.where(rack[:, None] == rack[None, :], 1e-3, 4e-3)
    return nominal * np.exp(draw.normal(0, own, nominal.shape)), rack


def test_racks_need_less_than_half_of_the_rounds() -> None:
    time_s, rack = racked(48, 1)
    times, chooser, samples = surveyed(time_s)
    assert chooser.progress.rounds <= 24 < chooser.progress.full_rounds == 47
    assert errors(times, time_s).mean() < 0.03 and errors(times, time_s).max() < 0.15
    assert chooser.progress.held_out[-1] <= 0.03
    alike = find_classes(tabulate_samples(samples, range(48)).select_size(1))
    assert alike is not None
    for label in set(alike.classes):
        assert len({rack[h] for h in range(48) if alike.classes[h] == label}) == 1
    assert len(set(alike.classes)) == 6
    met = {(sample.source, sample.target) for sample in samples}
    apart = ~np.eye(48, dtype=bool)
    assert times.predicted.sum() == 48 * 47 - len(met) == apart.sum() - len(met)
    made = np.log(times.time_s[-1] / time_s)[times.predicted]
    assert np.sqrt(np.mean(times.error[times.predicted] ** 2)) == pytest.approx(np.sqrt(np.mean(made**2)), rel=0.5)


def test_a_uniform_cluster_takes_few_rounds_and_no_structure_is_invented() -> None:
    times, chooser, samples = surveyed(np.full((32, 32), 1e-3))
    assert chooser.progress.rounds <= 12
    apart = ~np.eye(32, dtype=bool)
    assert np.std(np.log(times.time_s[-1][apart])) < 0.005
    assert find_classes(tabulate_samples(samples, range(32)).select_size(1)) is None
    assert times.repeatability[apart].mean() < 0.2


def test_slow_hosts_are_told_though_no_two_of_them_met_at_first() -> None:
    """A link between two slow hosts is no slower than one with one of them: the ways to say so disagree, so that such
    links are measured."""
    speed = np.ones(32)
    speed[[3, 17, 20]] = 0.4
    time_s = 1e-3 / np.minimum(speed[:, None], speed[None, :])
    times, chooser, _ = surveyed(time_s)
    assert chooser.progress.rounds <= 16
    assert errors(times, time_s).max() < 0.1


def test_where_nothing_is_common_everything_is_measured_at_little_more_than_a_tournament() -> None:
    draw = np.random.default_rng(2)
    time_s = 1e-3 * np.exp(draw.normal(0, 0.35, (32, 32)))
    times, chooser, _ = surveyed(time_s)
    assert chooser.progress.everything
    assert 31 <= chooser.progress.rounds <= 31 + 3
    assert not times.predicted.any() and errors(times, time_s).mean() < 0.03


def test_hosts_in_a_plane_are_told_by_their_places() -> None:
    """Times that grow with the distance, and no classes: half of the rounds would not do without a low-rank factor."""
    draw = np.random.default_rng(0)
    place = draw.uniform(0, 1, (80, 2))
    apart = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    time_s = 1e-3 * np.exp(apart + draw.normal(0, 0.02, (80, 80)))
    times, chooser, _ = surveyed(time_s)
    assert chooser.progress.rounds < 55 and not chooser.progress.everything
    assert chooser.progress.host_shape is not None and chooser.progress.host_shape.rank
    assert np.abs(times.time_s[-1] / time_s - 1)[times.predicted].mean() < 0.04


@pytest.mark.parametrize("wanted", [3, 9])
def test_as_many_rounds_as_are_wanted(wanted: int) -> None:
    time_s, _ = racked(24, 3)
    times, chooser, _ = surveyed(time_s, rounds_wanted=wanted)
    assert chooser.progress.rounds == wanted
    assert np.isfinite(times.time_s[-1][~np.eye(24, dtype=bool)]).all()


def test_more_rounds_than_there_are_pairs_are_not_played() -> None:
    times, chooser, _ = surveyed(np.full((6, 6), 1e-3), rounds_wanted=50)
    assert chooser.progress.everything and not times.predicted.any()


def test_the_same_samples_give_the_same_rounds() -> None:
    time_s, _ = racked(24, 4)
    assert surveyed(time_s)[2] == surveyed(time_s)[2]


def test_numbers_fall_into_two_heaps_or_not() -> None:
    draw = np.random.default_rng(5)
    assert split_values(draw.normal(0, 1, 500)) is None
    assert split_values(draw.uniform(0, 1, 500)) is None
    assert split_values(np.exp(draw.normal(0, 0.5, 500))) is None
    found = split_values(np.concatenate([draw.normal(-1.4, 0.05, 12), draw.normal(0, 0.05, 400)]))
    assert found is not None
    border, gap = found
    assert -1.2 < border < -0.2 and gap == pytest.approx(1.4, abs=0.1)
    assert split_values(np.concatenate([draw.normal(-0.02, 0.001, 50), draw.normal(0, 0.001, 50)])) is None, "too near"


def test_a_tournament_is_not_needed_to_find_classes_and_noise_makes_none() -> None:
    draw = np.random.default_rng(6)
    time_s = 1e-3 * np.exp(draw.normal(0, 0.3, (24, 1)) + draw.normal(0, 0.05, (24, 24)))
    found = survey_pairs(shuffle_members([range(24)]), (TINY, LARGE), 2, network(time_s))
    assert find_classes(tabulate_samples(found.samples, range(24)).select_size(1)) is None


def test_the_benchmark_runs(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.profiling.links", "--quick", "--json", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["cluster"]: row for row in json.loads(output.read_text())["simulated"]}
    assert len(rows) == 7
    assert rows["uniform"]["chosen"]["rounds"] < 15 and rows["uniform"]["chosen"]["false_structure"] < 0.005
    assert rows["unstructured"]["chosen"]["everything_measured"]
    assert "cloud regions" in done.stdout
