"""Planning under a memory correction: what fits by it is found and what does not is refused, on made-up facts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from tests.plan.devices.test_device_kinds import cluster as mixed
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster, save_cluster_file
from pipefit.codec import content_digest, dump_text
from pipefit.cost.memory.correction import PEAK_PARTS, MemoryRun
from pipefit.cost.memory.correction_file import MemoryFacts, learn_facts
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import ClusterError, DoesNotFitError, PlanError
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.explain.text import explain_text, memory_table
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.risk import analytic_limit_bytes, attach_risk, make_plan_at_risk, peak_parts
from pipefit.plan.types import Job, Plan

JOB = Job(batch=8, sequence=64, precision="float32")
KIND = "H100"


@lru_cache
def facts(factor: float = 1.0, noise: float = 0.01, kind: str = KIND) -> MemoryFacts:
    """Devices that take `factor` of what the model says, without its workspace, give or take `noise`."""
    random = np.random.default_rng(7)
    runs = []
    for plan in range(20):
        unit = float(10 ** random.uniform(3, 6))
        parts = {name: unit * float(10 ** random.uniform(-1.5, 1)) for name in PEAK_PARTS} | {
            "workspace": float(WORKSPACE_BYTES)
        }
        measured = factor * (sum(parts.values()) - WORKSPACE_BYTES) * float(np.exp(random.normal(0, noise)))
        runs.append(
            MemoryRun(configuration=str(plan), kind=kind, devices=4, rank=0, parts=parts, measured_bytes=measured)
        )
    return learn_facts(runs)


def cluster(memory_bytes: float) -> Cluster:
    made = plain_spec(f"4x{KIND}")
    return replace(made, kinds={KIND: replace(made.kinds[KIND], memory_bytes=int(memory_bytes))})


def need(plan: Plan, memory_bytes: float, factor: float) -> float:
    """What the fullest lane really takes of its limit."""
    parts = peak_parts(simulate_plan(plan, toy_model(), cluster(memory_bytes)))
    return max(factor * (sum(each.values()) - WORKSPACE_BYTES) for each in parts) / memory_bytes


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_what_fits_is_found_and_what_does_not_is_refused(factor: float) -> None:
    """At every limit from ample to hopeless: the plan fits in truth, and is refused only where the best is near it."""
    best = make_plan(toy_model(), cluster(1e12), JOB)
    whole = need(best, 1.0, factor)
    fitting = 0
    for share in (1.2, 0.5, 0.1, 0.01):
        limit = share * whole
        try:
            plan = make_plan_at_risk(toy_model(), cluster(limit), JOB, facts(factor))
        except DoesNotFitError:
            continue
        fitting += 1
        assert need(plan, limit, factor) <= 1.0
        assert plan.prediction is not None and plan.prediction.risk is not None and plan.prediction.risk <= 0.05
        assert plan.hashes.cluster == content_digest(cluster(limit))
        assert {lane.limit_bytes for lane in plan.prediction.lanes} == {float(int(limit))}, "its own, not the search's"
    assert 2 <= fitting < 4


def test_a_lower_risk_asks_for_more_room() -> None:
    """Just above what the fastest plan is expected to take: enough for who allows 40 %, not for who allows 1 %."""
    best = make_plan(toy_model(), cluster(1e12), JOB)
    limit = need(best, 1.0, 1.0) * 1.01
    eager, careful = (
        make_plan_at_risk(toy_model(), cluster(limit), JOB, facts(noise=0.02), one) for one in (0.4, 0.01)
    )
    assert eager.prediction is not None and eager.prediction.risk is not None
    assert careful.prediction is not None and careful.prediction.risk is not None
    assert 0.01 < eager.prediction.risk <= 0.4 and careful.prediction.risk <= 0.01
    assert careful.prediction.step_s > eager.prediction.step_s


def test_no_mix_of_parts_reaches_beyond_the_first_limit() -> None:
    correction = facts(1.3).corrections[KIND]
    limit, random = 1e9, np.random.default_rng(1)
    reach = analytic_limit_bytes(correction, limit, 0.05)
    for _ in range(100):
        sizes = random.dirichlet(np.ones(6)) * (reach * 1.001 - WORKSPACE_BYTES)
        parts = dict(zip(PEAK_PARTS, [*sizes.tolist(), float(WORKSPACE_BYTES)], strict=True))
        assert correction.estimate_rank(parts).oom_probability(limit) > 0.05


def test_it_is_printed() -> None:
    plan = make_plan_at_risk(toy_model(), cluster(1e12), JOB, facts())
    text = explain_text(plan)
    assert "probability that it does not fit: under 0.1%" in text
    assert "corrected" in text and "at most" in text
    assert f"memory on {KIND}: corrected by 20 measured plans of up to 4 devices" in text
    assert "probability" not in explain_text(make_plan(toy_model(), cluster(1e12), JOB))


def test_what_nothing_fits_into_is_told_as_the_users_own_memory() -> None:
    """Not only in bytes of the analytic model, which the search counts and nobody has on a card."""
    with pytest.raises(DoesNotFitError, match="No plan fits") as error:
        make_plan_at_risk(toy_model(), cluster(2**10), JOB, facts())
    assert "in bytes of the analytic model, limited at a risk of 5.0% to 64.0 MiB for the 1.00 KiB of H100" in str(
        error.value
    )
    taken = learn_facts([replace(run, measured_bytes=run.measured_bytes + 2**30) for run in facts().runs])
    with pytest.raises(DoesNotFitError, match="No plan fits"):
        make_plan_at_risk(toy_model(), cluster(2**10), JOB, taken)


def test_what_is_printed_of_fitting_is_by_the_correction() -> None:
    """Devices without the workspace that the analytic model assumes: its peaks are beyond all of their memory."""
    best = make_plan(toy_model(), cluster(1e12), JOB)
    small = cluster(1.2 * need(best, 1.0, 1.0))
    assert small.kinds[KIND].memory_bytes < WORKSPACE_BYTES
    plan = make_plan_at_risk(toy_model(), small, JOB, facts(), constraints=Constraints(stages=2, replicas=(1,)))
    assert plan.prediction is not None
    used = [row[-4] for row in memory_table(plan).rows]
    assert all(0 < float(one.rstrip("%")) <= 100 for one in used)
    assert any(one.fits and not one.chosen for one in plan.prediction.trade)


def test_mistakes() -> None:
    for risk in (0.0, 0.5, float("nan")):
        with pytest.raises(PlanError, match="not a valid risk"):
            make_plan_at_risk(toy_model(), cluster(1e12), JOB, facts(), risk)
    with pytest.raises(ClusterError, match="has no correction for the cluster's devices") as error:
        make_plan_at_risk(toy_model(), cluster(1e12), JOB, facts(kind="A100-80"))
    assert "A100-80" in str(error.value) and KIND in str(error.value)


def test_the_command(tmp_path: Path, pipefit) -> None:
    model, machines, memory = tmp_path / "model.json", tmp_path / "cluster.json", tmp_path / "memory.json"
    model.write_text(dump_text(toy_model()))
    save_cluster_file(cluster(1e12), machines)
    memory.write_text(dump_text(facts()))

    def run(*words: str) -> tuple[int, str, str]:
        fixed = ["plan", "--model", str(model), "--cluster", str(machines), "--batch", "8", "--seq", "64"]
        return pipefit(*fixed, *words)

    code, out, _ = run("--memory-correction", str(memory), "--max-oom-probability", "0.1")
    assert code == 0 and "probability that it does not fit" in out
    code, _, err = run("--risk", "0.1")
    assert code == 2 and "is unknown without a memory correction" in err and "--record FILE" in err
    code, _, err = run("--memory", str(tmp_path / "none.json"))
    assert code == 2 and "The file cannot be read." in err
    code, _, err = run("--memory", str(memory), "--risk", "2")
    assert code == 2 and "above 0 and below 0.5" in err


def test_alternatives_stand_beside_what_the_analytic_model_may_say() -> None:
    """Bytes of the same kind on both sides; a note says what the memory of the devices is."""
    best = make_plan(toy_model(), cluster(1e12), JOB)
    tight = cluster(1.02 * need(best, 1.3, 1.0))
    plan = make_plan_at_risk(toy_model(), tight, JOB, facts(1.3))
    assert plan.prediction is not None and plan.alternatives
    card = tight.kinds[KIND].memory_bytes
    assert all(one.limit_bytes != card for one in plan.alternatives)
    notes = [note for note in plan.prediction.assumptions if note.startswith("memory of alternatives: in bytes")]
    assert len(notes) == 1 and "at a risk of 5.0%" in notes[0]


def test_kinds_that_hold_different_amounts_are_judged_one_by_one() -> None:
    """A small device takes few rows: the plan says of each lane what the likeliest to overflow needs, by its own
    correction and its own memory."""
    sheet = plain_spec(f"4x{KIND}").kinds[KIND]
    model, decisions = toy_model(2), ParallelConfig(stages=1, replicas=(3, 1), microbatches=2, schedule="1f1b")
    job = Job(batch=8, sequence=2048, precision="bfloat16")
    both = mixed((replace(sheet, name=KIND), 1), (replace(sheet, name="small"), 1))
    plan = build_plan(model, both, job, decisions)
    simulation = simulate_plan(plan, model, both)
    [lane] = simulation.device_peaks
    peaks = {one.kind: one.peak_bytes for one in lane}
    assert peaks[KIND] > peaks["small"]
    few = {
        name: (peak - WORKSPACE_BYTES) * factor
        for (name, peak), factor in zip(sorted(peaks.items()), (2.0, 1.001), strict=True)
    }
    sized = {name: replace(one, memory_bytes=int(few[name])) for name, one in both.kinds.items()}
    told = learn_facts([replace(run, kind=kind) for kind in (KIND, "small") for run in facts().runs])
    judged = attach_risk(add_prediction(plan, model, simulation), model, replace(both, kinds=sized), told)
    assert judged.prediction is not None
    [one] = judged.prediction.lanes
    assert one.kind == "small" and one.limit_bytes == sized["small"].memory_bytes and one.memory is not None
    assert one.memory.expected_bytes == pytest.approx(peaks["small"] - WORKSPACE_BYTES, rel=0.01)
    assert one.memory.risk > 0.2 and judged.prediction.risk == pytest.approx(one.memory.risk)
    assert [(other.kind, other.peak_bytes) for other in one.others] == [(KIND, peaks[KIND])]
