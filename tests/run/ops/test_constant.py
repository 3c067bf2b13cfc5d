"""Known numbers in a graph: of the run's floating type or their own, and the pattern of causal attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipefit.model.graph import Graph, Operator, TensorSpec
from pipefit.model.ops.constant import LISTED_NUMBERS, pack_numbers, unpack_numbers
from pipefit.run.ops import OperatorContext, build_step


def run_constant(attributes):
    """The result of a constant with these attributes."""
    operator = Operator(kind="constant", inputs=(), outputs=("y",), attributes=attributes)
    tensors = (TensorSpec(name="y", shape=tuple(attributes["shape"]), dtype=attributes["dtype"]),)
    graph = Graph(inputs=(), outputs=("y",), operators=(operator,), parameters=(), tensors=tensors)
    context = OperatorContext(graph=graph, layer=0, model_layer=0, operator=0, dtype=torch.bfloat16,
                      device=torch.device("cpu"), seed=0, slices=1)  # fmt: skip
    return build_step(operator, context).call()


@pytest.mark.parametrize(
    ("values", "shape", "dtype", "wanted"),
    [
        ([1.5, 2.0], [1, 2], "compute", torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16)),
        ([0.1], [1], "float32", torch.tensor([0.1])),
        ([7, -1, 3], [3], "int64", torch.tensor([7, -1, 3])),
        ([0, 1], [2, 1], "bool", torch.tensor([[False], [True]])),
        ("causal", [3, 3], "bool", torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)),
    ],
)
def test_the_numbers_and_their_type(values, shape, dtype, wanted):
    numbers = run_constant({"values": values, "shape": shape, "dtype": dtype})
    assert numbers.dtype == wanted.dtype and torch.equal(numbers, wanted)


@pytest.mark.parametrize(
    ("numbers", "packed"),
    [
        (np.arange(LISTED_NUMBERS + 1) % 2, "i1:"),
        (np.arange(LISTED_NUMBERS + 1) - 300, "<i4:"),
        (np.arange(LISTED_NUMBERS + 1) / 4, "<f4:"),
        (np.arange(LISTED_NUMBERS + 1) / 10, "<f8:"),
        (np.r_[np.arange(LISTED_NUMBERS) / 4, -np.inf], "<f4:"),
        (np.r_[np.arange(LISTED_NUMBERS) / 4, np.nan], "<f4:"),
    ],
)
def test_many_numbers_are_packed_and_run_as_they_are(numbers, packed):
    values = pack_numbers(numbers.astype(float))
    assert isinstance(values, str) and values.startswith(packed)
    assert np.array_equal(unpack_numbers(values), numbers, equal_nan=True)
    attributes = {"values": values, "shape": [len(numbers)], "dtype": "float64"}
    assert np.array_equal(run_constant(attributes).numpy(), numbers, equal_nan=True)


def test_few_numbers_are_listed():
    numbers = np.arange(LISTED_NUMBERS) / 10
    values = pack_numbers(numbers)
    assert values == numbers.tolist() and np.array_equal(unpack_numbers(values), numbers)
