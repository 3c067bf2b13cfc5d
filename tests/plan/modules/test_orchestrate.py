"""Devices divided among modules: the same optimum as trying everything, the figures of the simulator, memory kept."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipefit.plan.modules.loads import SampleDealer, fullest_loads
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET
from pipefit.plan.modules.options import options_of, replica_counts
from pipefit.plan.modules.orchestrate import ModuleArrangement, backbone_of, can_share, orchestrate_modules
from pipefit.plan.modules.profile import FIGURE_NAMES, ModuleProfile, ModuleVariant, even_cuts
from pipefit.schedule.families import find_family
from pipefit.schedule.problem import ScheduleProblem, linear_placement, uniform_costs
from pipefit.simulate import simulate_schedule

ROOT = Path(__file__).parents[3]


def random_profile(name: str, random: np.random.Generator, layers: int, heavy: bool) -> ModuleProfile:
    """Uneven layers; two shard counts, two ways of recomputing; costs that make every choice matter."""
    seconds = random.uniform(0.5, 3.0, layers) * (3.0 if heavy else 1.0)
    bytes_ = random.uniform(0.5, 2.0, layers)
    ways = []
    for shards, (recompute, time, kept) in itertools.product((1, 2), (("none", 1.0, 1.0), ("full", 1.3, 0.2))):
        slower = shards * random.uniform(0.6, 0.95) if shards > 1 else 1.0
        ways.append(
            ModuleVariant(
                shards=shards,
                recompute=recompute,
                fixed_s=random.uniform(0.0, 0.2, layers),
                sample_s=seconds * time / slower,
                static_bytes=bytes_ / shards,
                state_bytes=2 * bytes_ / shards,
                saved_bytes=bytes_ * kept / shards,
                passing_bytes=random.uniform(0.0, 0.5, layers) / shards,
                gradient_bytes=bytes_ / shards,
            )
        )
    weights = random.lognormal(0.0, 0.6, (2, 6)) if heavy else np.ones((1, 0))
    return ModuleProfile(
        name=name, ways=tuple(ways), weights=weights, overhead_s=0.01, reduce_s_per_byte=0.3, workspace_bytes=0.5
    )


def layouts(profile: ModuleProfile, count: int, samples: int, limit: float) -> Iterator[tuple[float, ...]]:
    """Every layout of a module, in plain loops: (devices, stages, slowest, through, reduction, room)."""
    for way in profile.ways:
        layers = len(way.sample_s)
        for stages, replicas in itertools.product(range(1, layers + 1), range(1, samples + 1)):
            bounds = best_cut((way.fixed_s + way.sample_s).tolist(), stages)
            mean, most = fullest_loads(profile.weights, count, replicas, samples)
            times, sizes, room = [], [], math.inf
            for place, (start, stop) in enumerate(itertools.pairwise(bounds)):
                run = slice(start, stop)
                times.append(sum((way.fixed_s + mean * way.sample_s)[run]) + profile.overhead_s)
                sizes.append(sum(way.gradient_bytes[run]))
                held = sum((way.static_bytes + way.state_bytes / replicas)[run]) + profile.workspace_bytes
                held += most * max(way.passing_bytes[run])
                each = most * sum(way.saved_bytes[run])
                own = stages - place - 1
                fitting = [n for n in range(12) if held + min(count, own + n + 1) * each <= limit * (1 + 1e-12)]
                room = min(room, max(fitting, default=-1))
            if room >= 0:
                reduce_s = 2 * (1 - 1 / replicas) * profile.reduce_s_per_byte * max(sizes)
                yield replicas * stages * way.shards, stages, max(times), sum(times), reduce_s, room


def best_cut(seconds: list[float], stages: int) -> tuple[int, ...]:
    """By trying all: the slowest stage is fastest, and the earliest cuts of those."""
    layers = len(seconds)
    every = [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), stages - 1)]
    return min(every, key=lambda one: (round(max(sum(seconds[a:b]) for a, b in itertools.pairwise(one)), 9), one))


def brute_force(profiles: list[ModuleProfile], devices: int, batch: int, limit: float) -> float:
    best = math.inf
    for count in (count for count in range(1, batch + 1) if batch % count == 0):
        tables = [list(layouts(profile, count, batch // count, limit)) for profile in profiles]
        for chosen in itertools.product(*tables):
            if sum(one[0] for one in chosen) > devices:
                continue
            behind = [sum(other[1] for other in chosen[place + 1 :]) for place in range(len(chosen))]
            if all(one[5] >= more for one, more in zip(chosen, behind, strict=True)):
                through, slowest = sum(one[3] for one in chosen), max(one[2] for one in chosen)
                best = min(best, through + (count - 1) * slowest + max(one[4] for one in chosen))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_that_of_trying_everything(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [2, 3, 2] if seed % 2 else [3, 4]
    profiles = [random_profile(f"m{i}", random, layers, heavy=i == 0) for i, layers in enumerate(sizes)]
    devices, limit = int(random.integers(5, 11)), float(random.uniform(9.0, 22.0))
    found = orchestrate_modules(profiles, devices, 6, limit)
    assert found.best[0].step_s == pytest.approx(brute_force(profiles, devices, 6, limit), rel=1e-9)
    assert found.best[0].device_count <= devices
    steps = [one.step_s for one in found.best]
    assert steps == sorted(steps) and len({(one.microbatches, one.modules) for one in found.best}) == len(steps)


def shared_brute_force(
    profiles: list[ModuleProfile], backbone: int, guests: set[int], devices: int, batch: int, limit: float,
    multiple: int = 1,
) -> float:  # fmt: skip
    """Every layout of the modules with devices of their own, every way of the guests, in plain loops. The guests take
    so many microbatches together."""
    best = math.inf
    own = [place for place in range(len(profiles)) if place not in guests]
    for count in (count for count in range(1, batch + 1) if batch % count == 0):
        samples = batch // count
        tables = [list(plain_layouts(profiles[place], samples)) for place in own]
        ways = [list(profiles[place].ways) for place in sorted(guests)]
        for chosen in itertools.product(*tables):
            each = dict(zip(own, chosen, strict=True))
            if sum(way.shards * replicas * (len(bounds) - 1) for way, bounds, replicas in chosen) > devices:
                continue
            for guest_ways in itertools.product(*ways):
                with_guests = dict(zip(sorted(guests), guest_ways, strict=True))
                best = min(best, shared_step(profiles, backbone, each, with_guests, count, samples, limit, multiple))
    return best


def plain_layouts(profile: ModuleProfile, samples: int) -> Iterator[tuple[ModuleVariant, tuple[int, ...], int]]:
    for way in profile.ways:
        layers = len(way.sample_s)
        for stages, replicas in itertools.product(range(1, layers + 1), range(1, samples + 1)):
            yield way, best_cut((way.fixed_s + way.sample_s).tolist(), stages), replicas


def shared_step(
    profiles: list[ModuleProfile],
    backbone: int,
    each: dict[int, tuple[ModuleVariant, tuple[int, ...], int]],
    guests: dict[int, ModuleVariant],
    count: int,
    samples: int,
    limit: float,
    multiple: int = 1,
) -> float:
    """The step of one layout of everything, infinite where it does not fit or go."""
    runs: dict[int, list[tuple[float, ...]]] = {}
    for place, (way, bounds, replicas) in each.items():
        mean, most = fullest_loads(profiles[place].weights, count, replicas, samples)
        runs[place] = []
        for start, stop in itertools.pairwise(bounds):
            run = slice(start, stop)
            held = sum((way.static_bytes + way.state_bytes / replicas)[run]) + profiles[place].workspace_bytes
            runs[place].append((
                sum((way.fixed_s + mean * way.sample_s)[run]) + profiles[place].overhead_s,
                held + most * max(way.passing_bytes[run]),
                most * sum(way.saved_bytes[run]),
                2 * (1 - 1 / replicas) * profiles[place].reduce_s_per_byte * sum(way.gradient_bytes[run]),
            ))  # fmt: skip
    lanes, lane = len(runs[backbone]), each[backbone][0].shards * each[backbone][2]
    behind = {place: sum(len(runs[other]) for other in runs if other > place) for place in runs}
    units, first, guest_bytes, ahead, guest_reduce = math.ceil(count // multiple / lanes), 0.0, 0.0, 0.0, 0.0
    slowest_b, through_b = max(one[0] for one in runs[backbone]), sum(one[0] for one in runs[backbone])
    times = {}
    for place, way in guests.items():
        profile, replicas = profiles[place], lane // way.shards
        if replicas * way.shards != lane or replicas > samples * multiple or lanes > count // multiple:
            return math.inf
        if count % multiple or (multiple > 1 and way.shards > 1):
            return math.inf
        mean, most = fullest_loads(profile.weights, count // multiple, replicas, samples * multiple)
        times[place] = sum(way.fixed_s) + mean * sum(way.sample_s) + profile.overhead_s
        guest_bytes += sum(way.static_bytes) + sum(way.state_bytes) / replicas + most * max(way.passing_bytes)
        flying = math.ceil((lanes + behind[backbone]) / (lanes * multiple))
        alive = min(units, flying + 1) if place < backbone else 1
        guest_bytes += alive * most * sum(way.saved_bytes)
        guest_reduce += 2 * (1 - 1 / (replicas * lanes)) * profile.reduce_s_per_byte * sum(way.gradient_bytes)
    first = sum(times.values())
    more = max(0.0, first * (units - 1) - max(0.0, through_b - slowest_b)) / max(1, count - 1)
    for place, seconds in times.items():
        if place > backbone:
            ahead += multiple * math.ceil(seconds / (multiple * (slowest_b + more)))
    for place, own in runs.items():
        for index, (_, held, saved, _) in enumerate(own):
            flying = len(own) - index + behind[place] + (ahead if place == backbone else 0)
            beside = guest_bytes if place == backbone else 0.0
            if held + beside + min(count, flying) * saved > limit * (1 + 1e-12):
                return math.inf
    slowest = {place: max(one[0] for one in own) for place, own in runs.items()}
    reduces = {place: max(one[3] for one in own) for place, own in runs.items()}
    slowest[backbone] += more
    reduces[backbone] += guest_reduce
    through = first + sum(one[0] for own in runs.values() for one in own)
    return through + (count - 1) * max(slowest.values()) + max(reduces.values())


@pytest.mark.parametrize("seed", range(8))
def test_sharing_is_as_good_as_trying_everything(seed: int) -> None:
    """Every choice of modules that share, with and without modules behind the backbone and memory that binds."""
    random = np.random.default_rng(seed)
    sizes = [2, 3, 2] if seed % 2 else [2, 3]
    profiles = [random_profile(f"m{i}", random, layers, heavy=i == 1) for i, layers in enumerate(sizes)]
    assert backbone_of(profiles) == 1 and can_share(profiles) == {f"m{i}" for i in (0, 2) if i < len(sizes)}
    devices, limit = int(random.integers(3, 7)), float(random.uniform(14.0, 40.0))
    choices = [frozenset(names) for names in ((), ("m0",), ("m2",), ("m0", "m2")) if {*names} <= can_share(profiles)]
    found = orchestrate_modules(profiles, devices, 6, limit, sharing=choices)
    for guests in choices:
        own = [one.step_s for one in found.best if one.guest_names == guests]
        places = {index for index, one in enumerate(profiles) if one.name in guests}
        wanted = shared_brute_force(profiles, 1, places, devices, 6, limit)
        assert min(own, default=math.inf) == pytest.approx(wanted, rel=1e-9)
    steps = [one.step_s for one in found.best]
    assert steps == sorted(steps) and steps


@pytest.mark.parametrize(("seed", "multiple"), [(0, 2), (1, 2), (2, 3), (3, 3)])
def test_guests_that_take_several_microbatches_are_as_good_as_trying_everything(seed: int, multiple: int) -> None:
    random = np.random.default_rng(seed)
    profiles = [random_profile(f"m{i}", random, layers, heavy=i != 2) for i, layers in enumerate((2, 3, 2))]
    devices, limit = int(random.integers(3, 7)), float(random.uniform(40.0, 80.0))
    fixed = {name: {"multiple": multiple} for name in ("m0", "m2")}
    found = 0
    for guests in (frozenset(names) for names in (("m0",), ("m2",), ("m0", "m2"))):
        best = orchestrate_modules(profiles, devices, 6, limit, sharing=[guests], fixed=fixed).best
        places = {index for index, one in enumerate(profiles) if one.name in guests}
        wanted = shared_brute_force(profiles, 1, places, devices, 6, limit, multiple)
        assert min((one.step_s for one in best), default=math.inf) == pytest.approx(wanted, rel=1e-9)
        assert all(one.multiple == (multiple if one.shared else 1) for layout in best for one in layout.modules)
        found += bool(best)
    assert found >= 2, "most of them can lie so"


def together(
    profiles: list[ModuleProfile], devices: int, count: int, batch: int, limit: float
) -> list[tuple[float, tuple[tuple[int, ...], ...]]]:
    """Every combination of layouts that no other one of its module beats in everything, in plain loops: the step, and
    (way, replicas, stages) of each module."""
    tables = []
    for profile in profiles:
        every = options_of(profile, count, batch // count, devices, limit)
        columns = (every.devices, every.stages, every.slowest_s, every.through_s, every.reduce_s, -every.room)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        names = list(zip(every.way.tolist(), every.replicas.tolist(), every.stages.tolist(), strict=True))
        tables.append([
            (row, name)
            for at, (row, name) in enumerate(zip(rows, names, strict=True))
            if not any(
                all(a <= b for a, b in zip(other, row, strict=True)) and (other != row or place < at)
                for place, other in enumerate(rows)
            )
        ])  # fmt: skip
    found = []
    for chosen in itertools.product(*tables):
        own = [row for row, _ in chosen]
        behind = [sum(other[1] for other in own[place + 1 :]) for place in range(len(own))]
        if sum(row[0] for row in own) > devices or any(-row[5] < more for row, more in zip(own, behind, strict=True)):
            continue
        step_s = sum(row[3] for row in own) + (count - 1) * max(row[2] for row in own) + max(row[4] for row in own)
        found.append((step_s, tuple(name for _, name in chosen)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_short_list_is_the_best_of_all_that_nothing_beats(seed: int) -> None:
    """Not the optimum alone: the next ones as well, in their order, against every combination there is."""
    random = np.random.default_rng(seed)
    profiles = [random_profile(f"m{i}", random, layers, heavy=i == 0) for i, layers in enumerate([3, 2, 2])]
    devices, limit, batch = int(random.integers(7, 11)), float(random.uniform(11.0, 22.0)), 12
    found = orchestrate_modules(profiles, devices, batch, limit, top=20)
    every = [(one, count) for count in (1, 2, 3, 4, 6, 12) for one in together(profiles, devices, count, batch, limit)]
    every.sort()
    wanted = [step_s for (step_s, _), _ in every[:20] if step_s <= every[0][0][0] * (1 + DIVISION_BUDGET.step_slack)]
    assert [one.step_s for one in found.best] == pytest.approx(wanted, rel=1e-9) and len(wanted) > 10
    for arrangement, ((_, names), count) in zip(found.best[:3], every, strict=False):
        ways = [
            (profile.ways[way].shards, profile.ways[way].recompute)
            for profile, (way, _, _) in zip(profiles, names, strict=True)
        ]
        assert [(one.shards, one.recompute) for one in arrangement.modules] == ways
        assert [(one.replicas, one.stage_count) for one in arrangement.modules] == [name[1:] for name in names]
        assert arrangement.microbatches == count


def test_a_choice_has_the_same_list_whatever_was_looked_at_before() -> None:
    """Also where few of its layouts seemed enough, because it was slower than another choice, and then was not."""
    shortened = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        profiles = [random_profile(f"m{i}", random, layers, heavy=i == 1) for i, layers in enumerate([2, 4, 2])]
        devices, limit = int(random.integers(6, 16)), float(random.uniform(16.0, 40.0))
        choices = [frozenset(names) for names in (("m0", "m2"), ("m0",), ("m2",), ())]
        found, fastest_s = orchestrate_modules(profiles, devices, 12, limit, sharing=choices, top=40).best, math.inf
        for guests in choices:
            alone = orchestrate_modules(profiles, devices, 12, limit, sharing=[guests], top=40).best
            own = [one for one in found if one.guest_names == guests]
            slower = bool(alone) and alone[0].step_s > fastest_s
            shortened += slower and len(alone) > DIVISION_BUDGET.slower_sharing_layouts
            wanted = alone[: DIVISION_BUDGET.slower_sharing_layouts] if slower else alone
            assert [one.step_s for one in own] == [one.step_s for one in wanted]
            fastest_s = min([fastest_s, *(one.step_s for one in own)])
    assert shortened > 3


def test_nothing_that_fits_is_an_empty_list() -> None:
    profiles = [random_profile("m", np.random.default_rng(0), 3, heavy=False)]
    assert orchestrate_modules(profiles, 8, 6, 0.1).best == ()


def plain(name: str, layer_s: float, layers: int, factor: int = 3) -> ModuleProfile:
    """Equal layers of `layer_s` forward, no overheads, memory for everything; backward factor = factor - 1."""
    none = np.zeros(layers)
    way = ModuleVariant(
        shards=1,
        fixed_s=none,
        sample_s=np.full(layers, factor * layer_s),
        static_bytes=none,
        state_bytes=none,
        saved_bytes=none,
        passing_bytes=none,
        gradient_bytes=none,
    )
    return ModuleProfile(name=name, ways=(way,))


def test_devices_go_by_work() -> None:
    """Nine devices for modules whose work is as 1 to 2, with many microbatches: three and six of them."""
    best = orchestrate_modules([plain("vision", 1.0, 6), plain("language", 2.0, 6)], 9, 36, 1.0).best[0]
    assert [module.device_count for module in best.modules] == [3, 6]


def test_a_frozen_module_gets_fewer_devices() -> None:
    """Forward alone is a third of the work: one device for vision, where a trained one of the same size takes two."""

    def vision_devices(factor: int) -> int:
        profiles = [plain("vision", 1.0, 4, factor), plain("language", 1.0, 4)]
        return orchestrate_modules(profiles, 4, 24, 1.0).best[0].modules[0].device_count

    assert vision_devices(3) == 2 and vision_devices(1) == 1


def test_the_closed_form_is_the_simulated_step_of_equal_stages() -> None:
    best = orchestrate_modules([plain("vision", 1.0, 2), plain("language", 1.0, 4)], 6, 12, 1.0, counts=[12]).best[0]
    assert [module.stage_count for module in best.modules] == [2, 4]
    assert simulated_s(best, [1.0] * 6) == pytest.approx(best.step_s)


def simulated_s(best: ModuleArrangement, forward_s: list[float]) -> float:
    costs = uniform_costs(
        linear_placement(6),
        forward_s=forward_s,
        input_s=[2 * one for one in forward_s],
        weight_s=[0.0] * len(forward_s),
    )
    problem = ScheduleProblem(placement=linear_placement(6), microbatches=best.microbatches, costs=costs)
    return simulate_schedule(find_family("1f1b")(problem), costs).makespan_s


def test_cuts_of_every_number_are_the_best_ones() -> None:
    seconds = np.random.default_rng(3).uniform(0.1, 1.0, 6)
    found = even_cuts(seconds)
    assert [len(one) - 1 for one in found] == [1, 2, 3, 4, 5, 6]
    for own in found:
        own_s = max(seconds[a:b].sum() for a, b in itertools.pairwise(own))
        other = best_cut(seconds.tolist(), len(own) - 1)
        assert own_s == pytest.approx(max(seconds[a:b].sum() for a, b in itertools.pairwise(other)))


def test_loads_of_bins() -> None:
    """Dealt by hand: 8, 5 | 4, 3 | 2, 1 onto two bins are 8 + 3 + 2 and 5 + 4 + 1."""
    weights = np.array([[4.0, 8.0, 1.0, 3.0, 5.0, 2.0]])
    assert fullest_loads(weights, 1, 2, 6) == (13.0, 13.0)
    assert fullest_loads(weights, 6, 1, 1) == (pytest.approx(23 / 6), 8.0)
    assert fullest_loads(np.ones((1, 0)), 3, 4, 6) == (2.0, 2.0), "alike: two samples for each of the first ones"


@pytest.mark.parametrize(("microbatches", "replicas"), [(1, 5), (2, 4), (3, 3), (4, 3), (12, 1), (2, 1)])
def test_loads_are_those_of_dealing_one_sample_after_the_other(microbatches: int, replicas: int) -> None:
    """To and fro over the bins in plain loops, where the samples fill them evenly and where not."""
    weights = np.random.default_rng(1).lognormal(0.0, 0.7, (3, 12))
    mean, most, bins = [], [], microbatches * replicas
    for batch in weights.tolist():
        filled = [0.0] * bins
        for place, weight in enumerate(sorted(batch, reverse=True)):
            turn, at = divmod(place, bins)
            filled[bins - 1 - at if turn % 2 else at] += weight
        filled.sort()
        fullest = [max(filled[start : start + replicas]) for start in range(0, bins, replicas)]
        mean += fullest
        most.append(max(fullest))
    dealer = SampleDealer(weights)
    for _ in range(2):  # the second time it is known
        found = dealer.fullest_load(microbatches, replicas, 12 // microbatches)
        assert found == (pytest.approx(np.mean(mean)), pytest.approx(max(most)))
    assert fullest_loads(weights, microbatches, replicas, 12 // microbatches) == found


@pytest.mark.parametrize("seed", range(4))
def test_stages_that_tell_are_the_slowest_and_the_fullest(seed: int) -> None:
    """Of equal layers before a larger one most stages are left out, and the largest in anything is still there."""
    random = np.random.default_rng(seed)
    way = random_profile("m", random, 24, heavy=False).ways[seed]
    for name in FIGURE_NAMES[:-1]:
        layers = getattr(way, name)
        layers[:-1] = layers[1]
        layers[-1] *= 2.0
    cuts = way.stage_cuts
    assert len(cuts.stages[0]) < cuts.counts.sum() / 2
    for bounds, first, size in zip(cuts.bounds, cuts.first.tolist(), cuts.sizes.tolist(), strict=True):
        runs = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        for name, column in zip(FIGURE_NAMES[:-1], cuts.stages, strict=False):
            each = [getattr(way, name)[run] for run in runs]
            sums = [own.max() if name == "passing_bytes" else own.sum() for own in each]
            assert column[first : first + size].max() == pytest.approx(max(sums))
        assert cuts.stages[-1, first] == len(runs), "the first stage has all others behind it"


def test_replicas_that_spare_nobody_work_are_left_out() -> None:
    assert replica_counts(24, 100) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 24]
    assert replica_counts(24, 9) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_benchmark_divides_a_thousand_devices_in_a_moment(tmp_path: Path) -> None:
    """Processor time, with room for slow machines; the figure that counts is in the benchmark's own result."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.multimodal.sections", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert str(ROOT) not in text and str(tmp_path) not in text
    cases = {(one["devices"], one["training"]): one for one in json.loads(text)["closed"]["rows"]}
    for case in cases.values():
        assert case["orchestrate_processor_s"] < 1.0 and case["planning_processor_s"] < 3.0
        steps = {name: one["step_s"] for name, one in case["best"].items()}
        assert {
            "disjoint",
            "inline",
            "vision shared",
            "generator shared",
            "generator and vision shared",
        } == steps.keys()
        assert min(steps, key=lambda name: steps[name]) == next(iter(steps))
    large, frozen = (cases[1296, what]["best"]["disjoint"] for what in ("trained", "all but language frozen"))
    assert large["devices_used"] <= 1296
    assert sum(one["devices"] for one in large["modules"].values()) == large["devices_used"]
    assert frozen["step_s"] < large["step_s"]
    assert frozen["modules"]["vision"]["devices"] < large["modules"]["vision"]["devices"]
