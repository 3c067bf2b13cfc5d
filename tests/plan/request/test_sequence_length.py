"""A table of positions ends the sequence: told by `plan`, by `simulate` of a plan by hand, and before a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.plan_toys import VOCABULARY, WIDTH, toy_cluster, toy_model

from pipefit.cli import main
from pipefit.cluster import save_cluster_file
from pipefit.codec import dump_text
from pipefit.errors import PlanError
from pipefit.model.graph import Graph, Model, Operator, ParameterSpec, TensorSpec
from pipefit.plan.check.rules import check_plan, plan_problems, save_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sequence_length import position_tables
from pipefit.plan.types import Job, Plan

ROWS = 100
WORDS = ("The sequence is longer than the model's table of positions.", "at most 100: the table has 100 rows")


def positioned(rows: int = ROWS, offset: int = 0) -> Graph:
    """weight[tokens] + table[positions + offset]."""
    shift = Operator(kind="add", inputs=("positions", ""), outputs=("moved",), attributes={"scalar": offset})
    return Graph(
        inputs=(
            TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),
            TensorSpec(name="positions", shape=("B", "T"), dtype="int64", role="positions"),
        ),
        outputs=("y",),
        operators=(
            *([shift] if offset else []),
            Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("a",)),
            Operator(kind="embedding", inputs=("moved" if offset else "positions", "table"), outputs=("b",)),
            Operator(kind="add", inputs=("a", "b"), outputs=("y",)),
        ),
        parameters=(
            ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),
            ParameterSpec(name="table", shape=(rows, WIDTH)),
        ),
        tensors=(
            *([TensorSpec(name="moved", shape=("B", "T"), dtype="int64")] if offset else []),
            *(TensorSpec(name=name, shape=("B", "T", WIDTH)) for name in "aby"),
        ),
    )


def model(rows: int = ROWS) -> Model:
    plain = toy_model(2)
    module = plain.modules[0]
    embed = replace(module.layers[0], parameters={"weight": "embed.weight", "table": "embed.table"})
    graphs = {**plain.graphs, "embed": positioned(rows)}
    return replace(plain, modules=(replace(module, layers=(embed, *module.layers[1:])),), graphs=graphs)


def plan(sequence: int = ROWS, rows: int = ROWS) -> Plan:
    return build_plan(
        model(rows), toy_cluster(1, 2), Job(batch=4, sequence=sequence), ParallelConfig(stages=2, microbatches=2)
    )


@pytest.fixture
def pipefit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pipefit", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capsys.readouterr().err

    return run


def test_plan_refuses_a_sequence_beyond_the_table(pipefit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "model.json").write_text(dump_text(model()))
    words = ("plan", "--model", str(tmp_path / "model.json"), "--cluster", "2xH100", "--batch", "4", "--seq")
    code, err = pipefit(*words, "101")
    assert code == 2 and all(part in err for part in WORDS), err
    assert "where: --seq and embed.table of layer embed" in err and "seen: 101 tokens" in err
    assert "try: use sequences of 100 tokens" in err
    assert pipefit(*words, "100", "--quiet") == (0, "")


def test_a_plan_by_hand_is_refused_too(pipefit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """It is a valid plan by itself; only with the model can it be known."""
    (tmp_path / "model.json").write_text(dump_text(model()))
    longer = plan(101, rows=101)
    longer = replace(longer, parameters=plan().parameters, hashes=replace(longer.hashes, model=""))
    check_plan(longer)
    save_plan(longer, tmp_path / "plan.json")
    save_cluster_file(toy_cluster(1, 2), tmp_path / "cluster.json")
    words = ("--model", str(tmp_path / "model.json"), "--cluster", str(tmp_path / "cluster.json"))
    code, err = pipefit("simulate", str(tmp_path / "plan.json"), *words)
    assert code == 2 and all(part in err for part in WORDS) and "where: job.sequence and embed.table" in err, err
    assert [error.what for error in plan_problems(longer, model())] == [WORDS[0]]
    assert not list(plan_problems(plan(), model()))


def test_building_a_plan_refuses_as_well() -> None:
    with pytest.raises(PlanError, match="longer than the model's table of positions"):
        plan(ROWS + 1)


def test_an_offset_of_the_positions_counts() -> None:
    assert position_tables(positioned(100)) == {"table": 100}
    assert position_tables(positioned(100, offset=2)) == {"table": 98}


def test_gpt2_has_such_a_table_and_rotary_models_have_none(pipefit) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    from pipefit.model.registry import open_model

    code, err = pipefit("plan", "--model", "tiny-gpt2", "--cluster", "2xH100", "--batch", "4", "--seq", "4096")
    assert code == 2 and "at most 2048" in err and "transformer.wpe.weight" in err, err
    rotary = open_model("tiny-llama")
    limit = int(rotary.config["max_position_embeddings"])
    build_plan(rotary, toy_cluster(1, 2), Job(batch=2, sequence=4 * limit), ParallelConfig(stages=2, microbatches=2))
