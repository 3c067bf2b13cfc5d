"""An operator of another package, from the how-to page: checked, planned, split, trained as one process, and drawn."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.plugin_package import installed, page_examples, write_package

from pipefit.errors import ModelError
from pipefit.model.families import FAMILIES
from pipefit.model.ops import KINDS, OperatorKind, register_operator, table
from pipefit.model.ops.kind import same_shape
from pipefit.plugins import load_plugins
from pipefit.run.ops import build_step
from pipefit.shard.megatron import shard_program
from pipefit.shard.rules import OperatorLabels
from pipefit.shard.rules.pointwise import label_pointwise
from pipefit.testing.operators import OperatorExample, check_operator, temporary_operator

__all__ = ["installed"]

CONFIG = {"model_type": "toy_mlp", "vocab_size": 256, "width": 16, "layers": 4}


@pytest.fixture
def operator_site(tmp_path: Path, installed) -> Iterator[Path]:
    """The page's package and a model family whose layers use its operator, installed in this process."""
    family = page_examples("add-a-model-family.md")
    layers = family["toy_mlp/layers.py"].replace("F.gelu(self.up(x))", "self.activation(self.up(x))")
    layers = layers.replace("        self.down =", "        self.activation = SquaredReLU()\n        self.down =")
    family["toy_mlp/layers.py"] = "from toy_relu.module import SquaredReLU\n" + layers
    files = {"toy_mlp/__init__.py": "", "toy_relu/__init__.py": "", **family, **page_examples("add-an-operator.md")}
    files["toy_relu/all.py"] = "import toy_mlp.config\nimport toy_relu.operator\n"
    site = write_package(tmp_path / "site", files, "toy_relu.all")
    installed(site, FAMILIES, table.PLUGINS)
    load_plugins()
    yield site
    table._KINDS.pop("relu_squared", None)


def load_in_process(folder: str) -> tuple[str, ...]:
    """Load the plug-ins of a folder in a process of the pool."""
    sys.path.insert(0, folder)
    load_plugins.cache_clear()
    return load_plugins()


def test_the_page_s_example_passes_its_check(operator_site: Path) -> None:
    importlib.import_module("toy_relu.check").run_check()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "decisions",
    [{"stages": 2}, {"shards": (1, 1), "sharding": "megatron"}, {"shards": (2, 1), "sharding": "megatron-sp"}],
    ids=["stages", "megatron", "megatron-sp, uneven"],
)
def test_gradients_are_those_of_one_process(operator_site, gloo_pool, monkeypatch, decisions) -> None:
    monkeypatch.setitem(plans.CONFIGS, "toy-relu", CONFIG)
    plan, model = plans.plan("toy-relu", microbatches=2, **decisions), plans.model("toy-relu")
    kinds = [operator.kind for layer in model.layers for operator in model.layer_graph(layer).operators]
    assert kinds.count("relu_squared") == CONFIG["layers"]
    loss, gradients = plans.reference("toy-relu", plans.JOB)
    gloo_pool.run(load_in_process, str(operator_site), ranks=gloo_pool.size)
    gloo_pool.run(cases.prepare, [(plan, model)], ranks=gloo_pool.size)
    result = gloo_pool.run(cases.run_steps, plan, model, plans.VOCABULARY, ranks=len(plan.used_devices))[0]
    assert result["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert set(result["gradients"]) == set(gradients)
    for name, gradient in gradients.items():
        wanted = gradient.numpy()
        assert np.abs(result["gradients"][name] - wanted).max() <= 1e-10 * np.abs(wanted).max(), name


def test_tensor_parallelism_splits_it_between_two_products(operator_site, monkeypatch) -> None:
    monkeypatch.setitem(plans.CONFIGS, "toy-relu", CONFIG)
    model = plans.model("toy-relu")
    block = next(graph for graph in model.graphs.values() if any(op.kind == "relu_squared" for op in graph.operators))
    for local in shard_program(block, (1, 1), sequence_parallel=False).graphs:
        (operator,) = [operator for operator in local.operators if operator.kind == "relu_squared"]
        assert local.find_tensor(operator.outputs[0]).shape[-1] == 4 * CONFIG["width"] // 2


def test_commands_plan_and_draw_it(operator_site: Path, pipefit, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    code, _, err = pipefit("plan", "--model", str(tmp_path), "--cluster", "2xH100", "--batch", "8", "--seq", "16",
                           "--fix", "stages=2", "-o", str(plan))  # fmt: skip
    assert code == 0, err
    code, _, err = pipefit("report", str(plan), "-o", str(page))
    assert code == 0, err
    assert "(toy-mlp)" in page.read_text(encoding="utf-8")
    code, out, err = pipefit("shard", "--model", str(tmp_path), "--cluster", "2xH100", "--batch", "8", "--seq", "16")
    assert code == 0 and "= relu_squared(" in out, err


KIND = OperatorKind(kind="toy_double", summary="2 x.", inputs=("x",), shapes=same_shape)


def example(factor: float) -> OperatorExample:
    return OperatorExample(kind="toy_double", inputs={"x": ("B", "T", 8)}, reference=lambda x: x * factor)


@pytest.fixture
def doubling(monkeypatch) -> str:
    """A module that executes `toy_double`."""
    text = (
        "from pipefit.run.ops import OperatorStep\ndef build(operator, context): return OperatorStep(lambda x: x * 2)\n"
    )
    module = type(sys)("toy_double_run")
    exec(text, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def label_as_sum(operator, inputs, outputs) -> OperatorLabels:
    """The labels of a sum over tokens."""
    return replace(label_pointwise(operator, inputs, outputs), outputs=(("d0", None, "d2"),))


def test_a_check_finds_wrong_values_and_wrong_splits(doubling: str) -> None:
    with temporary_operator(KIND, rule=label_pointwise, builder=doubling):
        check_operator(example(2.0))
        with pytest.raises(AssertionError, match="toy_double: result is off by"):
            check_operator(example(2.5))
    assert "toy_double" not in KINDS
    wrong_shape = r"split along d1: a part has shape \[2, 3, 8\], not \[2, 6, 8\]"
    with (
        temporary_operator(KIND, rule=label_as_sum, builder=doubling),
        pytest.raises(AssertionError, match=wrong_shape),
    ):
        check_operator(example(2.0))


def test_an_example_of_an_unknown_kind_says_what_to_import() -> None:
    with pytest.raises(ModelError, match=r"kind is not registered(.|\n)*'toy_double'(.|\n)*load_plugins"):
        check_operator(example(2.0))


def test_an_operator_that_cannot_be_executed_names_its_module() -> None:
    with temporary_operator(KIND, rule=label_pointwise, builder="toy_missing.run"):
        operator = example(2.0).make_graph().operators[0]
        with pytest.raises(
            ModelError, match=r"'toy_double' of a plug-in cannot be executed(.|\n)*toy_missing"
        ) as error:
            build_step(operator, None)
    assert "with a function build(operator, context)" in str(error.value)


def test_the_name_of_another_operator_is_refused(doubling: str) -> None:
    with pytest.raises(ModelError, match=r"name of a built-in one(.|\n)*'linear'"):
        register_operator(replace(KIND, kind="linear"), rule=label_pointwise, builder=doubling)
    with temporary_operator(KIND, rule=label_pointwise, builder=doubling):
        register_operator(KIND, rule=label_pointwise, builder=doubling)
        with pytest.raises(ModelError, match="Two operator kinds have one name"):
            register_operator(KIND, rule=label_pointwise, builder="toy_other.run")
