"""Mistakes of operator modules are found at capture, in one error each: not in a rank, nor as an opaque layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipefit.errors import ModelError, PluginError
from pipefit.model.capture.layers import capture_layers
from pipefit.model.families.common import OperatorModule
from pipefit.model.graph import Model
from pipefit.model.ops import OperatorKind
from pipefit.model.ops.kind import same_shape
from pipefit.shard.rules.pointwise import label_pointwise
from pipefit.testing.operators import temporary_operator

KIND = OperatorKind(
    kind="toy_scale", summary="scale x w.", inputs=("x", "w"), attributes={"scale": "the factor"}, shapes=same_shape
)


class Scale(OperatorModule):
    kind = "toy_scale"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def operator_attributes(self):
        return {"scale": 2.0}

    def operator_parameters(self):
        return ("weight",)

    def forward(self, x):
        return 2.0 * x * self.weight


class Block(nn.Module):
    def __init__(self, inner: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.inner, self.copies = inner, copies

    def forward(self, x):
        return x + self.inner(*[x] * self.copies)


def changed(**values: object) -> Scale:
    """Return a module of a class that differs in these attributes."""
    return type("Scale", (Scale,), values)()


def capture(inner: nn.Module, copies: int = 1) -> Model:
    return capture_layers([Block(inner, copies)], x_features=16)


@pytest.fixture(autouse=True)
def scaling() -> Iterator[None]:
    with temporary_operator(KIND, rule=label_pointwise, builder="toy_scale_run"):
        yield


def test_a_module_that_fits_its_kind_is_captured() -> None:
    (graph,) = capture(Scale()).graphs.values()
    (operator,) = [operator for operator in graph.operators if operator.kind == "toy_scale"]
    assert operator.inputs == ("x", "inner.weight") and operator.attributes == {"scale": 2.0}


def test_a_layer_is_an_operator_module_and_inputs_have_names() -> None:
    class Mix(OperatorModule):
        kind = "toy_scale"

        def operator_attributes(self):
            return {"scale": 2.0}

        def forward(self, first, second):
            return 2.0 * first * second

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix()

        def forward(self, x):
            return self.mix(second=x, first=-x)

    for layer, inputs in ((Scale(), ("x", "weight")), (Swapped(), ("neg_0", "x"))):
        (graph,) = capture_layers([layer], x_features=16).graphs.values()
        (operator,) = [operator for operator in graph.operators if operator.kind == "toy_scale"]
        assert operator.inputs == inputs


FAULTS = {
    "a typo in the kind": (changed(kind="toy_scael"), 1, r"kind = 'toy_scael'(.|\n)*did you mean 'toy_scale'"),
    "no kind": (changed(kind=None), 1, r"kind = None(.|\n)*import the module that registers the kind"),
    "an unknown attribute": (
        changed(operator_attributes=lambda module: {"scael": 2.0}),
        1,
        r"does not declare(.|\n)*seen: 'scael'(.|\n)*toy_scale \(scale: the factor\)(.|\n)*did you mean 'scale'",
    ),
    "no dict": (changed(operator_attributes=lambda module: [2.0]), 1, r"are no dict(.|\n)*seen: \[2.0\]"),
    "no JSON": (changed(operator_attributes=lambda module: {"scale": torch.ones(1)}), 1, "is no JSON value"),
    "forgotten parameters": (
        changed(operator_parameters=lambda module: ()),
        1,
        r"differs from its parameters(.|\n)*seen: weight \(left out\)",
    ),
    "another parameter": (
        changed(operator_parameters=lambda module: ("wieght",)),
        1,
        r"seen: wieght \(no parameter\), weight \(left out\)\n  allowed: all parameters (.|\n)*: weight",
    ),
    "parameters without a method": (
        changed(operator_parameters=("weight",)),
        1,
        r"is a method(.|\n)*seen: .* = \('weight',\)\n  allowed: def operator_parameters\(self\): return \('weight',\)",
    ),
    "attributes without a method": (
        changed(operator_attributes={"scale": 2.0}),
        1,
        r"`operator_attributes` of an operator module is a method",
    ),
    "three inputs": (Scale(), 2, r"number of inputs(.|\n)*seen: 2 tensors and 1 parameters\n  allowed: .*: x, w"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_one_error_at_capture(fault: str) -> None:
    module, copies, message = FAULTS[fault]
    with pytest.raises(ModelError, match=message) as error:
        capture(module, copies)
    assert "Scale at inner" in str(error.value)


def test_an_absent_input_is_allowed_if_it_is_optional() -> None:
    optional = replace(KIND, kind="toy_optional", inputs=("x", "w", "b?"))
    with temporary_operator(optional, rule=label_pointwise, builder="toy_scale_run"):
        (graph,) = capture(changed(kind="toy_optional")).graphs.values()
    assert ("x", "inner.weight", "") in [operator.inputs for operator in graph.operators]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (lambda inputs, attributes: inputs[5], "(?s)operator kind 'toy_other' failed.*IndexError"),
        (lambda inputs, attributes: None, "(?s)operator kind 'toy_other' returned.*allowed: tuple"),
        (lambda inputs, attributes: (inputs[0], inputs[0]), "(?s)operator kind 'toy_other' failed.*unpack"),
    ],
)
def test_shapes_that_fail_are_named(shapes, message: str) -> None:
    kind = replace(KIND, kind="toy_other", shapes=shapes)
    with (
        temporary_operator(kind, rule=label_pointwise, builder="toy_scale_run"),
        pytest.raises(PluginError, match=message),
    ):
        capture(changed(kind="toy_other"))
