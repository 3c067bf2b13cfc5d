"""Nothing is fitted to what is then predicted: published numbers of predicted rows are spoilt, predictions stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.validate.calibration import PublishedSample, SampleEvaluator, corner_jacobians, fit_calibration
from pipefit.validate.files import shipped_collectives, shipped_text
from pipefit.validate.records import ValidationResult
from pipefit.validate.sets import gh200, selene, vtrain

Results = dict[tuple[str, str], ValidationResult]


def predictions(result: ValidationResult) -> dict[str, float]:
    return {row.name: row.predicted for row in result.rows}


@pytest.mark.parametrize("spoilt", ["megatron-22B", "megatron-1T"])
def test_selene_leaves_the_model_out(results: Results, spoilt: str) -> None:
    published = selene.read_models(shipped_text(selene.FILE))
    cases = [
        replace(case, iteration_s={mode: 7.0 * time for mode, time in case.iteration_s.items()})
        if case.model == spoilt
        else case
        for case in published.cases
    ]
    before = predictions(results["selene", "iteration time"])
    after = predictions(selene.time_result(replace(published, cases=tuple(cases)), shipped_collectives()))
    for name in before:
        if name.startswith(spoilt):
            assert after[name] == before[name]
        else:
            assert after[name] != before[name], "and the others are fitted to the spoilt model"


def test_gh200_time_reads_nothing_of_the_predicted_plans(results: Results) -> None:
    published = gh200.read_profile(shipped_text(gh200.FILE))
    spoilt = replace(
        published,
        plans=tuple(
            replace(plan, measured_iteration_s=99.0, measured_gradient_reduce_s=99.0)
            if plan.micro_batch == gh200.FAIR_MICRO_BATCH
            else plan
            for plan in published.plans
        ),
    )
    assert predictions(gh200.time_result(spoilt)) == predictions(results["gh200", "iteration time"])


def test_gh200_time_is_fitted_to_two_small_plans_only() -> None:
    """And not to the record that the data set warns of."""
    published = gh200.read_profile(shipped_text(gh200.FILE))
    before = gh200.reduction_slowdown(published)
    moved = set()
    for index, plan in enumerate(published.plans):
        plans = list(published.plans)
        plans[index] = replace(plan, measured_gradient_reduce_s=2 * plan.measured_gradient_reduce_s)
        if gh200.reduction_slowdown(replace(published, plans=tuple(plans))) != before:
            moved.add(plan.name)
    assert moved == {"N2_D2", "N4_D2"}


def test_gh200_memory_is_fitted_to_the_five_small_plans(results: Results) -> None:
    published = gh200.read_profile(shipped_text(gh200.FILE))
    spoilt = replace(
        published,
        plans=tuple(
            plan
            if plan.micro_batch <= gh200.SMALL_MICRO_BATCH
            else replace(plan, measured_peak_memory_bytes=10 * plan.measured_peak_memory_bytes)
            for plan in published.plans
        ),
    )
    assert predictions(gh200.memory_result(spoilt)) == predictions(results["gh200", "peak memory"])


def test_vtrain_parts_are_whole_keys_and_cover_everything() -> None:
    samples = vtrain.read_samples(shipped_text(vtrain.FILE))
    parts = vtrain.deal_keys(samples)
    assert [len(part) for part in parts] == [36] * 4
    assert frozenset().union(*parts) == {sample.shape_key for sample in samples}
    assert len({sample.shape_key for sample in samples}) == 144


def test_vtrain_predicts_held_out_keys_blindly(results: Results) -> None:
    """The first turn: all rows outside the fitted quarter are spoilt."""
    samples = vtrain.read_samples(shipped_text(vtrain.FILE))
    part = vtrain.deal_keys(samples)[0]
    spoilt = tuple(s if s.shape_key in part else replace(s, published_s=13.0 * s.published_s) for s in samples)
    evaluator = SampleEvaluator(shipped_collectives())
    calibration = fit_calibration(
        vtrain.corner_samples([s for s in spoilt if s.shape_key in part]),
        evaluator,
        corner_jacobians(vtrain.corner_samples(spoilt), evaluator),
    )
    held = [sample for sample in spoilt if sample.shape_key not in part]
    before = {row.name: row.predicted for row in results["vtrain", "iteration time"].rows}
    for sample, time_s in zip(held, evaluator.times_s(held, calibration), strict=True):
        assert before[f"turn 1: {sample.row_label}"] == time_s


def test_vtrain_fits_what_it_is_given() -> None:
    """Rows that the model itself made, with other constants than the start: calibration finds their times again."""
    samples = vtrain.corner_samples(
        [s for s in vtrain.read_samples(shipped_text(vtrain.FILE)) if s.micro_batch == 2 and s.hidden == 2048]
    )
    evaluator = SampleEvaluator(shipped_collectives())
    from pipefit.validate.calibration import START_CONSTANTS, FittedCalibration

    truth = FittedCalibration(
        constants=tuple(value * factor for value, factor in zip(START_CONSTANTS.values(), FACTORS, strict=True))
    )
    made = [
        replace(sample, published_s=float(time_s))
        for sample, time_s in zip(samples, evaluator.times_s(samples, truth), strict=True)
    ]
    found = fit_calibration(made, evaluator, corner_jacobians(made, evaluator))
    off = [abs(a / b - 1) for a, b in zip(evaluator.times_s(made, found), _published(made), strict=True)]
    start = [
        abs(a / b - 1) for a, b in zip(evaluator.times_s(made, FittedCalibration()), _published(made), strict=True)
    ]
    assert sum(start) / len(start) > 0.1
    assert sum(off) / len(off) < 0.01


FACTORS = (1.4, 0.9, 1.1, 0.8, 1.5, 1.2, 0.9)


def _published(samples: list[PublishedSample]) -> list[float]:
    return [sample.published_s for sample in samples]


def test_a_regret_counts_what_choosing_loses() -> None:
    samples = vtrain.read_samples(shipped_text(vtrain.FILE))
    groups = {sample.comparison_group for sample in samples}
    from pipefit.validate.records import ValidationRow

    exact = [ValidationRow(name="", published=s.published_s, predicted=s.published_s) for s in samples]
    assert set(vtrain.choice_regret(samples, exact).first) == {0.0}
    inverse = [ValidationRow(name="", published=s.published_s, predicted=1 / s.published_s) for s in samples]
    lost = vtrain.choice_regret(samples, inverse)
    assert len(lost.first) <= len(groups) and min(lost.first) > 0
    assert all(five <= first for five, first in zip(lost.best_of_five, lost.first, strict=True))


def test_the_published_vtrain_rows_are_a_simulators() -> None:
    """Half of the keys lie on a + b layers + c micro-batches + d layers x micro-batches to 1e-5, and a hop between
    pipeline stages costs the same 12.5 GiB/s to five digits: no stopwatch does that. docs/results/validation.md says
    so."""
    samples = vtrain.read_samples(shipped_text(vtrain.FILE))
    assert vtrain.plane_deviation(samples) < 1e-5
    noisy = [replace(s, published_s=s.published_s * (1.01 if i % 3 else 0.99)) for i, s in enumerate(samples)]
    assert vtrain.plane_deviation(noisy) > 1e-3
    times = {
        (s.pp, s.layers, s.global_batch): s.published_s for s in samples if (*s.layer_shape, s.dp) == (1024, 1, 1, 1)
    }
    # T(12 layers) extrapolated to none, two micro-batches: head, embedding, optimizer and the hops between stages
    ends = {pp: 2 * times[pp, 12, 2] - times[pp, 24, 2] for pp in (2, 4)}
    hop_s = (ends[4] - ends[2]) / 2
    assert hop_s == pytest.approx(2 * (1024 * 1024 * 2) / (12.5 * 2**30), rel=1e-5)


def test_small_layers_scatter_as_the_page_says() -> None:
    """A layer at hidden 2048, TP 4: 8 % less time with micro-batch 2 than with 1, from differences of rows."""
    times = {
        (s.micro_batch, s.layers, s.microbatches): s.published_s
        for s in vtrain.read_samples(shipped_text(vtrain.FILE))
        if (s.hidden, s.tp, s.dp, s.pp) == (2048, 4, 1, 1)
    }

    def layer_s(micro_batch: int) -> float:
        by_layers = {n: times[micro_batch, 24, n] - times[micro_batch, 12, n] for n in (4, 8)}
        return (by_layers[8] - by_layers[4]) / (12 * 4)

    assert layer_s(2) / layer_s(1) == pytest.approx(0.92, abs=0.005)
