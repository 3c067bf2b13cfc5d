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

from pipefit.errors import ModelError, PluginError
from pipefit.model.capture.layers import capture_layers
from pipefit.model.families import FAMILIES
from pipefit.model.families.common import OperatorModule
from pipefit.model.ops import KINDS, OperatorKind, register_operator, table
from pipefit.model.ops.kind import same_shape, save_input
from pipefit.plan.request.sliceable import document_obstacles, slicing_obstacles
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


SQUARE = OperatorKind(kind="toy_square", summary="x^2.", inputs=("x",), shapes=same_shape, saves=save_input)
SQUARES = OperatorExample(kind="toy_square", inputs={"x": ("B", "T", 8)}, reference=lambda x: x * x)


def add_module(monkeypatch, text: str) -> str:
    """Return the name of a new module with this text, which may use OperatorStep."""
    module = type(sys)("toy_run")
    exec(f"from pipefit.run.ops import OperatorStep\n{text}", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.fixture
def doubling(monkeypatch) -> str:
    """A module that executes `toy_double`."""
    return add_module(monkeypatch, "def build(operator, context): return OperatorStep(lambda x: x * 2)")


@pytest.fixture
def squaring(monkeypatch) -> str:
    """A module that executes `toy_square`."""
    return add_module(monkeypatch, "def build(operator, context): return OperatorStep(lambda x: x * x)")


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


SHIFT = OperatorKind(kind="toy_shift", summary="x of the token before.", inputs=("x",), shapes=same_shape)


class Shift(OperatorModule):
    kind = "toy_shift"

    def forward(self, x):
        return x.roll(1, dims=1)


SHIFTS = OperatorExample(kind="toy_shift", inputs={"x": ("B", "T", 16)}, reference=Shift().forward, module=Shift())


def label_all_but_tokens(operator, inputs, outputs) -> OperatorLabels:
    labels = ("d0", None, "d2")
    return replace(label_pointwise(operator, inputs, outputs), inputs=(labels,), outputs=(labels,))


def label_tokens_of_the_input(operator, inputs, outputs) -> OperatorLabels:
    return replace(label_pointwise(operator, inputs, outputs), outputs=(("d0", None, "d2"),))


@pytest.mark.parametrize("rule", [label_all_but_tokens, label_tokens_of_the_input])
def test_an_operator_whose_rule_does_not_split_tokens_is_not_sliced(monkeypatch, rule) -> None:
    """A rule that splits them wrongly fails the check."""
    builder = add_module(monkeypatch, "def build(operator, context): return OperatorStep(lambda x: x.roll(1, dims=1))")
    with temporary_operator(SHIFT, rule=label_all_but_tokens, builder=builder):
        check_operator(SHIFTS)
    with temporary_operator(SHIFT, rule=rule, builder=builder):
        model = capture_layers([Shift()], x_features=16)
        (sliced,), (apart,) = slicing_obstacles(model), document_obstacles(model)
    assert "its rule does not split the tokens, so it may mix them" in sliced.what
    assert "toy_shift, whose tokens have the labels" in str(sliced) and "None" in str(sliced.seen)
    assert "Documents cannot be kept apart" in apart.what
    with temporary_operator(SHIFT, rule=label_pointwise, builder=builder):
        assert not [*slicing_obstacles(capture_layers([Shift()], x_features=16))]
        with pytest.raises(AssertionError, match="toy_shift, split along d1: another result"):
            check_operator(SHIFTS)


def test_a_label_with_dependent_parts_does_not_make_tokens_separate(squaring: str) -> None:
    def label_dependent(operator, inputs, outputs) -> OperatorLabels:
        return replace(label_pointwise(operator, inputs, outputs), kinds={"d1": "toy_square"})

    with temporary_operator(SQUARE, rule=label_dependent, builder=squaring):
        (obstacle,) = slicing_obstacles(capture_layers([Square()], x_features=16))
    assert "whose tokens have the labels d1" in str(obstacle)


def wrong_labels(operator, inputs, outputs) -> OperatorLabels:
    return replace(label_pointwise(operator, inputs, outputs), inputs=(("d0",),))


FACTS = {
    "another shape": ({"shapes": lambda inputs, attributes: (("B", "T", 4),)}, {}, r"shapes states \[2, 6, 4\]"),
    "no shapes": ({"shapes": lambda inputs, attributes: None}, {}, "shapes returns None, not a tuple of shapes"),
    "a list of shapes": ({"shapes": lambda inputs, attributes: [inputs[0]]}, {}, "not a tuple of shapes"),
    "another dtype": ({"output_dtype": "int64"}, {}, "output_dtype states torch.int64"),
    "saves nothing": ({"saves": lambda operator, needs: ()}, {}, "autograd saves 768 bytes.* state 0"),
    "saves no name": ({"saves": lambda operator, needs: ("z",)}, {}, r"saves returns \('z',\), not names of x, y"),
    "saves None": ({"saves": lambda operator, needs: None}, {}, "saves returns None, not a tuple"),
    "FLOPs": ({"flops": lambda call: 7}, {}, "flops returns 7, not Flops"),
    "arity": ({"own_bytes": lambda: 7}, {}, "own_bytes raises TypeError"),
    "no bytes": ({"forward_extra": lambda call: None}, {}, "forward_extra returns None, not a number of bytes"),
    "an undeclared attribute": ({}, {"attributes": {"scale": 2.0}}, "attributes does not declare scale"),
    "no reference": ({}, {"reference": lambda x: None}, "the reference returns NoneType"),
    "two operands": ({}, {"reference": lambda x, y: x}, "reference raises TypeError"),
}


@pytest.mark.parametrize("fault", FACTS)
def test_a_check_finds_wrong_facts(squaring: str, fault: str) -> None:
    kind, values, message = FACTS[fault]
    with (
        temporary_operator(replace(SQUARE, **kind), rule=label_pointwise, builder=squaring),
        pytest.raises(AssertionError, match=message) as error,
    ):
        check_operator(replace(SQUARES, **values))
    assert "toy_square" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build(operator, context): return lambda x: x * x", "toy_square' returned.*\n.*\n.*\n.*OperatorStep"),
        ("def build(operator): return None", "toy_square' failed(.|\n)*TypeError"),
        ("def build(operator, context): return OperatorStep(lambda x: None)", "the step returns NoneType"),
        ("def build(operator, context): return OperatorStep(lambda: 1)", "toy_square: the operator raises TypeError"),
        ("def build(operator, context): return OperatorStep(lambda x: x * operator.attributes['s'])", "KeyError: 's'"),
    ],
)
def test_a_check_names_a_builder_of_a_wrong_type(monkeypatch, text: str, message: str) -> None:
    builder = add_module(monkeypatch, text)
    with (
        temporary_operator(SQUARE, rule=label_pointwise, builder=builder),
        pytest.raises((AssertionError, PluginError), match=message),
    ):
        check_operator(SQUARES)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda operator, inputs, outputs: None, "the rule returns None, not OperatorLabels"),
        (lambda operator: None, "rule raises TypeError"),
        (wrong_labels, r"the rule has labels \('d0',\) for input 0 of shape \('B', 'T', 8\)"),
    ],
)
def test_a_check_names_a_rule_of_a_wrong_type(squaring: str, rule, message: str) -> None:
    with (
        temporary_operator(SQUARE, rule=rule, builder=squaring),
        pytest.raises(AssertionError, match=message),
    ):
        check_operator(SQUARES)


class Square(OperatorModule):
    kind = "toy_square"

    def forward(self, x):
        return x * x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": lambda module, x: x * x * 1.1}, "the module's result is off by"),
        ({"forward": lambda module, x: x * x.detach()}, "the module's gradient of x is off by"),
        ({"forward": lambda module: None}, "forward of the module raises TypeError"),
        ({"forward": lambda module, x: x[0]}, r"the module's result has shape \[6, 8\], not \[2, 6, 8\]"),
        ({"kind": "gelu"}, "the module has the kind"),
    ],
)
def test_a_check_finds_a_module_that_differs(squaring: str, changes, message: str) -> None:
    with temporary_operator(SQUARE, rule=label_pointwise, builder=squaring):
        check_operator(replace(SQUARES, module=Square()))
        with pytest.raises(AssertionError, match=message):
            check_operator(replace(SQUARES, module=type("Square", (Square,), changes)()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parameters": frozenset({"w"})},
            r"that it does not have\.(.|\n)*parameters(.|\n)*seen: w\n.*allowed: x",
        ),
        ({"integers": {"tokens": 8}}, r"OperatorExample\.integers(.|\n)*seen: tokens"),
        ({"module": Square}, r"an instance of OperatorModule\.(.|\n)*Square'>\n  allowed: .*Square\(\.\.\.\)"),
    ],
)
def test_an_example_names_its_own_inputs_and_an_instance(changes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(SQUARES, **changes)


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
