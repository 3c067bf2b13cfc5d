"""What cannot be cut into slices is refused, with the reason, by `plan`, for plans by hand, and before a run."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tests.support import unsliceable_models
from tests.support.op_cases import CASES

from pipefit.cli import main
from pipefit.cluster import local_cluster
from pipefit.errors import PlanError
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, TensorSpec, has_tokens
from pipefit.model.ops import KINDS
from pipefit.model.registry import open_model, resolve_model
from pipefit.plan.assemble.order import lower_for_plan, make_schedule_plan
from pipefit.plan.check.rules import check_plan, load_plan, plan_problems, save_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sliceable import check_slices, layer_obstacles, min_slice_tokens, slicing_obstacles
from pipefit.plan.types import Job
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker
from pipefit.schedule.families import find_family
from pipefit.schedule.problem import ScheduleProblem, linear_placement

FILE = Path(unsliceable_models.__file__)
JOB = Job(batch=4, sequence=12)

REFUSED = {
    "bidirectional": ("not causal cannot be cut into slices: a token needs later tokens", "without a causal mask"),
    "products": ("mixes tokens outside of attention cannot be cut", "matmul of every token with every other"),
    "dropped_attention": ("nothing says that it does not mix tokens", "attention with dropout of probabilities"),
    "undeclared": ("nothing says that it does not mix tokens", "seen: opaque"),
    "dropped": ("draws its own random numbers, which would change", "inner.1: Dropout"),
    "convolved": ("mixes tokens and cannot be cut into slices", "mix: Conv1d"),
    "normed": ("mixes tokens and cannot be cut into slices", "norm: BatchNorm1d"),
}


@lru_cache
def model(name: str):
    described = resolve_model(f"{FILE}:{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture_family(described.family, described.config)


@pytest.fixture
def pipefit(capsys, monkeypatch):
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pipefit", *words])
        code = 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, " ".join(capsys.readouterr().err.split())

    return run


def planning(name: str, *fixes: str) -> list[str]:
    words = ["plan", "--model", name, "--cluster", "2xH100", "--batch", "4", "--seq", "12"]
    return [*words, *(word for fix in fixes for word in ("--fix", fix))]


def cut_by_hand(name: str, slices: tuple[int, ...]):
    """A plan of the model with uncut sequences, whose order then is that of slices."""
    whole = build_plan(model(name), local_cluster(2), JOB, ParallelConfig(cuts=(2,), microbatches=2))
    ordered = find_family("1f1b")(ScheduleProblem(placement=linear_placement(2), microbatches=2, slices=len(slices)))
    lowered = lower_for_plan(ordered, whole.groups, whole.stages, whole.edges, whole.parameters)
    return replace(whole, order=make_schedule_plan(lowered, slices))


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_be_cut_is_named_with_the_reason(name):
    what, seen = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        build_plan(model(name), local_cluster(2), JOB, ParallelConfig(cuts=(2,), slices=(6, 6)))
    text = " ".join(str(caught.value).split())
    assert what in text and seen in text and "slices and layer layers.1" in text, text
    build_plan(model(name), local_cluster(2), JOB, ParallelConfig(cuts=(2,)))


SEQUENCES = [
    case
    for case in CASES
    if any(has_tokens(size) for size in next(iter(case.inputs.values()), None) or ())
    and not (KINDS[case.kind].read_later or KINDS[case.kind].packs_rows)
    and case.kind != "aten"  # in graphs of complete models only, whose sequence is fixed
]


@pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case.id)
def test_an_operator_whose_rule_leaves_tokens_together_says_that_it_mixes_them(case):
    _, labelled, outputs = case.find_labels()
    pairs = zip((*case.inputs.values(), *outputs), (*labelled.inputs, *labelled.outputs), strict=True)
    labels = {
        label for shape, dims in pairs for size, label in zip(shape or (), dims or (), strict=True) if has_tokens(size)
    }
    obstacles = [*layer_obstacles(case.make_graph(), "here")]
    if len(labels) > 1 or labels & {None, *labelled.kinds, *labelled.joint}:
        assert obstacles, labels


def test_plan_refuses_a_fix(pipefit):
    code, err = pipefit(*planning(f"{FILE}:bidirectional", "slices=6,6"))
    assert code == 2 and REFUSED["bidirectional"][0] in err and "where: --fix slices and layer" in err, err
    assert "leave out the slices, or make the attention causal" in err
    assert pipefit(*planning(f"{FILE}:bidirectional", "stages=2"))[0] == 0


def test_a_plan_by_hand_is_refused_before_a_run(pipefit, tmp_path):
    """By itself it is valid; with the model it is not."""
    sliced = cut_by_hand("bidirectional", (6, 6))
    sliced = replace(sliced, hashes=replace(sliced.hashes, cluster=""))
    check_plan(sliced)
    assert [REFUSED["bidirectional"][0] in error.what for error in plan_problems(sliced, model("bidirectional"))] == [
        True
    ]
    save_plan(sliced, tmp_path / "plan.json")
    words = ("--model", f"{FILE}:bidirectional", "--cluster", "2xA100-80")
    code, err = pipefit("simulate", str(tmp_path / "plan.json"), *words)
    assert code == 2 and REFUSED["bidirectional"][0] in err and "order.slices and layer" in err, err
    with pytest.raises(PlanError, match="a token needs later tokens"):
        build_worker(sliced, model("bidirectional"), CommGroups(), torch.device("cpu"), OptimizerConfig())


@pytest.mark.parametrize("fix", ["slices=5,5", "slices=12,0", "slices=6,7"])
def test_slices_must_add_up(pipefit, fix):
    code, err = pipefit(*planning("tiny-llama", fix))
    assert code == 2 and "The slices must add up to the sequence." in err, err
    assert "positive lengths adding up to 12" in err and "where: --fix slices" in err


def test_slices_of_a_plan_by_hand_must_add_up():
    sliced = cut_by_hand("tokenwise", (6, 6))
    wrong = replace(sliced, order=replace(sliced.order, slices=(6, 5)))
    with pytest.raises(PlanError, match=r"must add up to the sequence"):
        check_plan(wrong)


def test_a_slice_needs_a_token_for_every_shard(pipefit):
    fixes = ("slices=11,1", "shards=2", "sharding=megatron-sp")
    code, err = pipefit(*planning("tiny-llama", *fixes))
    assert code == 2 and "shorter than its shards need: one of them would have no token" in err, err
    assert "slice 1 of 1 token(s), over shards of shares 1, 1" in err and "slices of 2 tokens or more" in err
    assert pipefit(*planning("tiny-llama", "slices=9,3", *fixes[1:]))[0] == 0
    assert pipefit(*planning("tiny-llama", fixes[0], "shards=2", "sharding=megatron"))[0] == 0


def test_a_slice_of_a_plan_by_hand_needs_a_token_for_every_shard():
    llama = open_model("tiny-llama")
    decisions = ParallelConfig(stages=1, shards=(1, 1), sharding="megatron-sp", slices=(10, 2))
    good = build_plan(llama, local_cluster(2), JOB, decisions)
    check_plan(good, llama)
    with pytest.raises(PlanError, match="one of them would have no token") as caught:
        check_plan(replace(good, order=replace(good.order, slices=(11, 1))))
    assert "order.slices and stages[0].sharding" in str(caught.value)
    with pytest.raises(PlanError, match="one of them would have no token"):
        build_plan(llama, local_cluster(2), JOB, replace(decisions, slices=(1, 11)))


def test_uneven_shares_need_longer_slices():
    assert [min_slice_tokens(shares) for shares in ((1, 1), (2, 1), (5, 1), (1, 1, 1, 1))] == [2, 2, 4, 4]
    with pytest.raises(PlanError, match="slices of 4 tokens or more"):
        check_slices((10, 2), 12, (5, 1), "megatron-sp")
    check_slices((), 12, (5, 1), "megatron-sp")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-mixtral"])
def test_families_have_no_obstacles(name):
    assert not list(slicing_obstacles(open_model(name)))


def test_a_layer_that_says_so_works_on_each_token():
    assert model("tokenwise").layer_graph(model("tokenwise").layers[1]).operators[0].kind == "opaque"
    assert not list(slicing_obstacles(model("tokenwise")))
    check_plan(cut_by_hand("tokenwise", (5, 7)), model("tokenwise"))


def layer_of(*steps):
    """A model of one layer: x (B, T, 16) through (kind, shape of the result, attributes) one after the other."""
    x = TensorSpec(name="x", shape=("B", "T", 16))
    tensors, operators = [x], []
    for index, (kind, shape, attributes) in enumerate(steps):
        name = tensors[-1].name
        repeats = {"matmul": 2, "concat": 2, "gated_delta": 5}.get(kind, 1)
        inputs = (name, "w") if kind == "linear" else (name,) * repeats
        tensors.append(TensorSpec(name=f"t{index}", shape=shape))
        operators.append(Operator(kind=kind, inputs=inputs, outputs=(f"t{index}",), attributes=attributes))
    graph = Graph(
        inputs=(x,), outputs=(tensors[-1].name,), operators=tuple(operators),
        parameters=(ParameterSpec(name="w", shape=(16, 16)),), tensors=tuple(tensors[1:]),
    )  # fmt: skip
    layer = Layer(name="one", graph=graph.hash, parameters={"w": "w"})
    return Model(
        family="user", config={}, modules=(ModelModule(name="m", layers=(layer,)),), graphs={graph.hash: graph}
    )


def reshape(*shape):
    return ("reshape", shape, {"shape": list(shape)})


TURNED = ("transpose", ("B", 16, "T"), {"dims": [0, 2, 1]})
EACH_TOKEN = {
    "flattened": [reshape("B*T", 16), ("linear", ("B*T", 16), {}), reshape("B", "T", 16)],
    "heads": [reshape("B", "T", 4, 4), reshape("4*B*T", 4), ("softmax", ("4*B*T", 4), {"dim": 1})],
    "products of heads": [reshape("B", "T", 4, 4), ("matmul", ("B", "T", 4, 4), {})],
    "joined features": [("concat", ("B", "T", 32), {"dim": 2}), ("slice", ("B", "T", 8), {"dim": 2})],
    "a slice of all": [("slice", ("B", "T", 16), {"dim": 1, "start": 0, "stop": "T"})],
    "turned": [TURNED, ("silu", ("B", 16, "T"), {}), ("softmax", ("B", 16, "T"), {"dim": 1})],
}
MIXED = {
    "reshape that puts tokens together": [reshape("B", 16, "T")],
    "softmax along the tokens": [("softmax", ("B", "T", 16), {"dim": 1})],
    "slice along the tokens": [("slice", ("B", 1, 16), {"dim": 1, "start": 0, "stop": 1})],
    "concat along the tokens": [("concat", ("B", "2*T", 16), {"dim": 1})],
    "rms_norm along the tokens": [TURNED, ("rms_norm", ("B", 16, "T"), {})],
    "matmul that sums over tokens": [TURNED, ("matmul", ("B", 16, "T"), {})],
    "gated_delta that reads all earlier tokens": [
        reshape("B", "T", 4, 4), ("gated_delta", ("B", "T", 4, 4), {"chunk": 4, "scale": 0.5, "norm_eps": None}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", EACH_TOKEN)
def test_operators_on_each_token(name):
    assert [str(error) for error in slicing_obstacles(layer_of(*EACH_TOKEN[name]))] == []


@pytest.mark.parametrize("name", MIXED)
def test_operators_that_mix_tokens(name):
    (error,) = slicing_obstacles(layer_of(*MIXED[name]))
    assert "mixes tokens outside of attention" in error.what and str(error.seen).startswith(name), error


def test_documents_apart_are_planned_and_told(pipefit, tmp_path):
    words = [*planning("tiny-llama", "slices=6,6"), "--documents", "apart", "-o", str(tmp_path / "plan.json")]
    assert pipefit(*words)[0] == 0
    made = load_plan(tmp_path / "plan.json")
    assert made.job.documents == "apart" and made.prediction is not None
    assert any("attention is costed as if they were joined" in note for note in made.prediction.assumptions)
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "old.json").write_text(text.replace(', "documents": "apart"', ""))  # as plans were before
    assert load_plan(tmp_path / "old.json").job.documents == "joined"


def test_documents_are_joined_or_apart(pipefit):
    code, err = pipefit(*planning("tiny-llama"), "--documents", "split")
    assert code == 2 and "Documents are joined or kept apart." in err and "seen: split" in err, err


@pytest.mark.parametrize("name", ["bidirectional", "products", "undeclared", "convolved"])
def test_documents_cannot_be_kept_apart_where_no_mask_reaches(pipefit, name):
    the_plan = build_plan(model(name), local_cluster(2), JOB, ParallelConfig(cuts=(2,)))
    apart = replace(the_plan, job=replace(JOB, documents="apart"))
    (error,) = plan_problems(apart, model(name))
    assert "mixes tokens outside of causal attention, or may" in error.what and "layers.1" in str(error)
    assert "--documents joined" in str(error)
    code, err = pipefit(*planning(f"{FILE}:{name}"), "--documents", "apart")
    assert code == 2 and "Documents cannot be kept apart" in err and "where: --documents and layer" in err, err
    with pytest.raises(PlanError, match="Documents cannot be kept apart"):
        build_worker(apart, model(name), CommGroups(), torch.device("cpu"), OptimizerConfig())
