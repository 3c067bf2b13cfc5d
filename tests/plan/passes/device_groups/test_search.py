"""Groups of devices as stages, found by the planner: which cluster calls for which, floors, constraints, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.plan_toys import block_graph, toy_cluster, toy_model
from torch import nn
from torch.nn import functional

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.codec import dump_text, load_text
from pipefit.cost.comm.network import Network
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.layout import IDENTITY, shard_form
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example
from pipefit.model.registry import open_model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.check.rules import check_plan, check_staleness
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.text import explain_text
from pipefit.plan.make import make_plan
from pipefit.plan.passes.device_groups.hidden_forms import LaneForms, cheapest_forms, pass_s, single_device_lane
from pipefit.plan.passes.device_groups.layouts import iter_layouts
from pipefit.plan.passes.device_groups.program_costs import GroupRequest, ProgramOracle
from pipefit.plan.passes.device_groups.search import GroupSearch
from pipefit.plan.passes.memory_trade import trade_memory
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints, parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan

JOB = Job(batch=2, sequence=48, precision="float32")
NOTHING = SearchResult(fitting=(), misfits=(), unfit=0, lower_bound_s=0, open_bound_s=0, considered=0, simulated=0)


def cluster_of(hosts: list[tuple[str, int]], between: float, memory_bytes: float = 1 << 30) -> Cluster:
    """Hosts of fast and slow devices, 3:1, fast links inside and a network of `between` bytes/s."""

    def kind(name: str, rate: float) -> DeviceKind:
        peaks = dict.fromkeys(("float64", "float32", "bfloat16"), rate)
        return DeviceKind(
            name=name, memory_bytes=int(memory_bytes), peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=rate
        )

    count = len(hosts)
    rates = tuple(tuple(between if a != b else 0.0 for b in range(count)) for a in range(count))
    return Cluster(
        name="unlike",
        kinds={"fast": kind("fast", 3e6), "slow": kind("slow", 1e6)},
        links={"inside": Link(latency_s=1e-5, bandwidth_bytes_per_s=6e7)},
        hosts=tuple(Host(name=f"host{h}", kind=k, devices=n, link="inside") for h, (k, n) in enumerate(hosts)),
        rails=(Rail(name="network", latency_s=((0.0,) * count,) * count, bandwidth_bytes_per_s=rates),),
        provenance=Provenance(source="assumed", where="a test"),
    )


def shares_of(plan: Plan) -> list[tuple[int, ...]]:
    return [group.to_mesh().find_axis("shard").shares for group in plan.groups]


def note_of(plan: Plan) -> str:
    assert plan.prediction is not None
    return next(note for note in plan.prediction.assumptions if note.startswith("groups: "))


def test_one_group_of_unlike_devices_where_links_bear_it() -> None:
    """Two layers that count, and two rows: no pipeline and no replicas divide them like one fast and three slow
    devices, 3:1:1:1."""
    model, cluster = toy_model(1), cluster_of([("fast", 1), ("slow", 3)], 1e6)
    plan = make_plan(model, cluster, JOB)
    assert shares_of(plan) == [(3, 1, 1, 1)]
    assert plan.stages[0].sharding == "searched"
    assert plan.recipes and all(key.startswith(f"{plan.stages[0].recipes}/") for key in plan.recipes)
    assert "less than without" in note_of(plan)
    assert "searched" in explain_text(plan) and "shards (3:1:1:1)" in explain_text(plan)
    check_plan(plan)
    check_staleness(plan, model, cluster)
    assert load_text(Plan, dump_text(plan), "plan") == plan
    assert simulate_plan(plan, model, cluster).timeline.makespan_s == pytest.approx(plan.prediction.step_s)


def test_a_pipeline_of_groups_of_different_sizes_where_the_network_is_slow() -> None:
    """The same devices, and a network that a group over both hosts would wait for: a stage on the fast device, and one
    on the three slow ones."""
    model, cluster = toy_model(3), cluster_of([("fast", 1), ("slow", 3)], 5e4)
    plan = make_plan(model, cluster, JOB)
    assert sorted(map(len, shares_of(plan))) == [1, 3]
    assert [stage.sharding == "searched" for stage in plan.stages] == [len(one) > 1 for one in shares_of(plan)]
    grouped = next(group for group in plan.groups if len(group.devices) == 3)
    assert grouped.devices == (1, 2, 3)
    check_plan(plan)
    check_staleness(plan, model, cluster)
    without = make_plan(model, cluster, JOB, parse_constraints(["groups=false"]))
    assert not any(len(one) > 1 for one in shares_of(without))
    assert not any(note.startswith("groups: ") for note in without.prediction.assumptions)
    assert plan.prediction.step_s < 0.95 * without.prediction.step_s
    whole = make_plan(model, cluster, JOB, parse_constraints(["stages=1", "replicas=1"]))
    assert plan.prediction.step_s < 0.95 * whole.prediction.step_s


def test_a_pipeline_of_groups_is_filled_by_slices() -> None:
    """A fast device and two slow ones behind a slow network, two rows: without slices half of a pipeline waits."""
    model, cluster, job = toy_model(3), cluster_of([("fast", 1), ("slow", 2)], 1e4), replace(JOB, sequence=96)
    context = PlannerContext(model, cluster)
    made = GroupSearch(context, job, NO_CONSTRAINTS, NOTHING).run()
    best, whole = made[0], next(one for one in made if not one.decisions.slices)
    assert len(best.decisions.slices) > 1 and sum(best.decisions.slices) == 96
    assert sorted(map(len, best.decisions.lane_shards)) == [1, 2]
    assert best.step_s < 0.8 * whole.step_s
    plan = context.assemble_plan(best.parts, best.decisions, best.simulation.timeline.schedule)
    check_plan(plan)
    assert load_text(Plan, dump_text(plan), "plan") == plan
    assert simulate_plan(plan, model, cluster).timeline.makespan_s == pytest.approx(best.step_s)
    assert not any(one.decisions.slices for one in GroupSearch(context, job, Constraints(slices=1), NOTHING).run())


def test_groups_hold_what_no_device_holds_alone() -> None:
    """The block's parameters, gradients and state are more than one device has, and are one layer: nothing fits without
    splitting it."""
    model = toy_model(1)
    model = replace(model, graphs={**model.graphs, "block": block_graph(128)})
    block = 2 * 8 * 128 * 16
    cluster = cluster_of([("fast", 4)], 1e6, WORKSPACE_BYTES + 0.9 * block)
    job = replace(JOB, sequence=4)
    plan = make_plan(model, cluster, job)
    assert max(map(len, shares_of(plan))) > 1
    assert "less than without" in note_of(plan), "the fixed programs split the block as well"


def test_no_plan_is_faster_than_its_floor() -> None:
    for hosts, between in (([("fast", 1), ("slow", 3)], 1e6), ([("fast", 2), ("slow", 2)], 1e5)):
        context = PlannerContext(toy_model(2), cluster_of(hosts, between))
        looker = GroupSearch(context, JOB, NO_CONSTRAINTS, NOTHING)
        floors = {
            (
                candidate.layout.device_order,
                tuple(len(lane[0]) for lane in candidate.layout.lanes),
                candidate.microbatches,
            ): candidate.step_s
            for candidate in looker.promising_candidates()
        }
        made = looker.run()
        assert len(made) > 1
        for one in made:
            chosen = one.decisions
            sizes = tuple(map(len, chosen.lane_shards))
            assert one.step_s >= floors[chosen.devices, sizes, chosen.microbatches] * (1 - 1e-9)


@pytest.mark.parametrize(
    ("fixes", "tried"),
    [
        (["shards=1"], False),
        (["shards=2", "sharding=megatron"], False),
        (["slices=2"], False),
        (["replicas=1", "stages=1", "shards=4"], True),
        (["recompute=full", "microbatches=2"], True),
    ],
)
def test_constraints_are_kept(fixes: list[str], tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[GroupSearch] = []
    run = GroupSearch.run

    def recorded_run(search: GroupSearch) -> list[EvaluatedPlan]:
        searches.append(search)
        return run(search)

    monkeypatch.setattr(GroupSearch, "run", recorded_run)
    cluster = cluster_of([("fast", 1), ("slow", 3)], 1e6)
    plan = make_plan(toy_model(1), cluster, replace(JOB, sequence=512), parse_constraints(fixes))
    words = dict(fix.split("=") for fix in fixes)
    for key, value in words.items():
        if key in ("stages", "microbatches", "recompute", "sharding"):
            assert plan.decisions[key] == value
    if "shards" in words:
        assert {len(shares) for shares in shares_of(plan)} == {int(words["shards"])}
        assert len({share for shares in shares_of(plan) for share in shares}) == 1, "a count means even shares"
    assert bool(searches) == tried


def test_layouts_are_there_once_and_hold_a_device_once() -> None:
    for network in (Network(toy_cluster(2, 4)), Network(toy_cluster(4, 8))):
        found = list(iter_layouts(network, 16, 6))
        assert len({frozenset(one.lanes) for one in found}) == len(found) > 20
        for one in found:
            assert len({*one.device_order}) == len(one.device_order) and one.is_grouped
            assert {len(lane) for lane in one.lanes} == {one.replica_count}
            assert all(list(group) == sorted(group) for lane in one.lanes for group in lane)
    sizes = {tuple(len(lane[0]) for lane in one.lanes) for one in iter_layouts(Network(toy_cluster(2, 2)), 16, 6)}
    assert {(4,), (1, 3), (3, 1), (2, 2), (1, 1, 2)} <= sizes


def test_forms_between_groups_cost_what_they_move() -> None:
    """A tensor of 4 rows x 8 tokens x 2 numbers of 4 bytes; 10 bytes/s between any two devices, one port each."""
    network = Network(toy_cluster(1, 4))
    rows, tokens = shard_form(0), shard_form(1)
    two = LaneForms(devices=(0, 1), shares=(1, 1), cost_s={IDENTITY: 1.0, rows: 1.0, tokens: 1.0})
    other = LaneForms(devices=(2, 3), shares=(3, 1), cost_s={IDENTITY: 1.0, rows: 1.0, tokens: 1.0})

    def seconds(size: float) -> float:
        return network.transfer_time([(0, 2, size)]).whole_s

    shape, all_bytes = (4, 8, 2), 4 * 8 * 2 * 4.0
    assert pass_s(network, (two, rows), (other, IDENTITY), shape, 4) is None, "nobody adds the partial sums up"
    assert pass_s(network, (single_device_lane(0, 1.0), IDENTITY), (other, IDENTITY), shape, 4) is None
    whole = pass_s(network, (two, IDENTITY), (other, IDENTITY), shape, 4)
    assert whole == pytest.approx(2 * seconds(all_bytes)), "each sends all of it, and all of its partial gradient"
    split_ = pass_s(network, (two, tokens), (other, tokens), shape, 4)
    assert split_ == pytest.approx(seconds(all_bytes / 2) + seconds(all_bytes * 3 / 4)), "the busiest sends its share"
    back = pass_s(network, (two, IDENTITY), (single_device_lane(2, 1.0), IDENTITY), shape, 4)
    assert back == pytest.approx(2 * seconds(all_bytes)), "one sends it, and gets all of the gradient"
    chosen = cheapest_forms(network, [two, other], (0, 1), shape, 4)
    assert chosen is not None and chosen[0] == chosen[1] != IDENTITY
    dear = replace(other, cost_s={IDENTITY: 1.0, rows: 1e9, tokens: 1e9})
    assert cheapest_forms(network, [two, dear], (0, 1), shape, 4) == (IDENTITY, IDENTITY)
    assert (
        cheapest_forms(network, [single_device_lane(0, 1.0), replace(dear, cost_s={IDENTITY: 1.0})], (0, 1), shape, 4)
        is None
    )


def test_of_forms_that_cost_the_same_the_first_is_taken() -> None:
    """In every process: a plan is the same wherever it is made."""
    forms = [shard_form(dim) for dim in (2, 1, 0)]
    network, cost_s = Network(toy_cluster(1, 4)), dict.fromkeys([*forms, IDENTITY], 1.0)
    lanes = [LaneForms(devices=devices, shares=(1, 1), cost_s=cost_s) for devices in ((0, 1), (2, 3))]
    assert cheapest_forms(network, lanes, (0, 1, 0), (4, 8, 2), 4) == (forms[0], forms[0])
    assert cheapest_forms(network, lanes, (0, 1), (4, 8, 2), 4) == (forms[0], forms[0])


class Narrowing(nn.Module):
    """Two layers: the one behind the middle hands on the loss, which is no hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(numbers))).squeeze(-1)


def test_groups_for_few_layers_that_hand_on_different_shapes() -> None:
    inputs = {"numbers": torch.zeros(2, 4), "labels": torch.zeros(2)}
    model = capture_whole(Example(module=Narrowing(), inputs=inputs, loss=functional.mse_loss))
    shapes = [model.layer_graph(layer).find_tensor(model.layer_graph(layer).outputs[0]).shape for layer in model.layers]
    assert shapes == [("B", 16), ()]
    job = Job(batch=8, sequence=1, precision="float32")
    looker = GroupSearch(
        PlannerContext(model, cluster_of([("fast", 2), ("slow", 2)], 1e5)), job, NO_CONSTRAINTS, NOTHING
    )
    assert looker.hidden_shape(4) == (4, 16)
    candidates = [
        candidate
        for candidate in looker.promising_candidates()
        if [len(lane[0]) for lane in candidate.layout.lanes] == [2, 2]
    ]
    assert candidates and all(map(looker.build_decisions, candidates))


def test_the_order_in_which_a_cluster_names_its_hosts_decides_nothing() -> None:
    """The fast group computes the front and holds what is under way there, wherever its host stands in the file."""
    job, constraints = replace(JOB, batch=4), parse_constraints(["stages=2", "replicas=1", "slices=1"])
    hosts = [("fast", 2), ("slow", 3)]
    one, two = (
        GroupSearch(PlannerContext(toy_model(3), cluster_of(order, 5e5)), job, constraints, NOTHING).run()[0]
        for order in (hosts, hosts[::-1])
    )
    assert one.decisions.lane_shards == two.decisions.lane_shards == ((1, 1), (1, 1, 1))
    assert two.step_s == pytest.approx(one.step_s)


def test_one_group_for_all_layers_holds_the_hidden_state_of_each_as_is_best() -> None:
    """Where no stage hands it on, blocks may hold it by rows and the vocabulary by features: less than one form for
    all costs."""
    job = Job(batch=8, sequence=1024, precision="bfloat16")
    looker = GroupSearch(
        PlannerContext(open_model("tiny-gpt2"), plain_spec("2xH100")), job, Constraints(shards=(1, 1)), NOTHING
    )
    candidate = next(
        candidate
        for candidate in looker.promising_candidates()
        if len(candidate.layout.lanes) == candidate.microbatches == 1
    )
    (ask,) = looker.lane_requests(candidate)
    assert ask is not None
    best = looker.oracle.best_programs(ask)
    assert best is not None
    assert best.cost_s < 0.995 * min(one.cost_s for one in looker.oracle.programs_by_form(ask).values())
    chosen = looker.build_decisions(candidate)
    assert chosen is not None
    recipes = looker.context.programs.recipes_in({*chosen.recipes})
    assert {*recipes.values()} == {link.layer_recipe.recipe_text for link in best.links}


def test_what_goes_on_between_groups_but_not_back_is_no_point_of_the_trade() -> None:
    """The first group holds the hidden state whole, the second in tokens: it can go on, but not come back, as it would
    in families whose lanes hold several stages."""
    context = PlannerContext(toy_model(3), cluster_of([("fast", 2), ("slow", 2)], 1e5))
    oracle = ProgramOracle(context, JOB)
    shares, recipes = [], []
    for devices, form in (((0, 1), IDENTITY), ((2, 3), shard_form(1))):
        found = oracle.programs_by_form(
            GroupRequest(lane=(devices,), rows=1, microbatches=2, part=0.5, tied_whole=False)
        )[form]
        links = zip(context.only_module.layers, found.links, strict=True)
        recipes.append(
            context.programs.add_recipes({layer.graph: link.layer_recipe.recipe_text for layer, link in links})
        )
        shares.append(found.shares)
    decisions = ParallelConfig(
        stages=2,
        replicas=(1,),
        shards=shares[0],
        sharding="searched",
        lane_shards=tuple(shares),
        recipes=tuple(recipes),
        microbatches=2,
        schedule="1f1b",
        devices=(0, 1, 2, 3),
    )
    best = evaluate_candidate(context, decisions, context.make_skeleton(JOB, decisions))
    with pytest.raises(FormsError, match="incompatible forms"):
        context.make_skeleton(JOB, replace(decisions, stages=4, placement=(0, 1, 0, 1)))
    families = {point.schedule for point in trade_memory(context, JOB, NO_CONSTRAINTS, best).points}
    assert {"1f1b", "zb-h1"} < families and not families & {"interleaved-1f1b", "v-half"}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(280)
def test_every_command_takes_a_plan_of_groups(tmp_path: Path) -> None:
    """One sequence on three devices: a program divides it best. From the search to the report of its run."""
    (tmp_path / "cluster.json").write_text(dump_text(cluster_of([("fast", 3)], 1e6)))
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
    job = ["--model", "tiny-llama", "--cluster", "cluster.json", "--batch", "1", "--seq", "48"]
    said = {}
    for words in (
        ["plan", *job, "--precision", "float32", "-o", "p.json"],
        ["explain", "p.json"],
        ["simulate", "p.json", "--cluster", "cluster.json"],
        ["verify", "p.json"],
        ["train", "p.json", "--data", "text.txt", "-o", "run", "--steps", "2", "--local", "3", "--trace", "2"],
        ["report", "run", "-o", "out.html"],
        ["compare", "p.json", "run"],
    ):
        command = [sys.executable, "-m", "pipefit", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{words[0]}: {done.stderr}"
        said[words[0]] = done.stdout
    plan = load_text(Plan, (tmp_path / "p.json").read_text(), "plan")
    assert shares_of(plan) == [(1, 1, 1)] and plan.stages[0].sharding == "searched"
    assert "3 shards" in said["explain"] and "chosen" in said["explain"]
    assert "the plan fits" in said["verify"]
    assert f"searched {plan.stages[0].recipes}" in (tmp_path / "out.html").read_text()
