"""Known numbers in a graph: of the run's floating type or their own, and the pattern of causal attention."""

from __future__ import annotations

import pytest
import torch

from pipefit.model.graph import Graph, Operator, TensorSpec
from pipefit.run.ops import OperatorContext, build_step


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
    attributes = {"values": values, "shape": shape, "dtype": dtype}
    operator = Operator(kind="constant", inputs=(), outputs=("y",), attributes=attributes)
    tensors = (TensorSpec(name="y", shape=tuple(shape), dtype=dtype),)
    graph = Graph(inputs=(), outputs=("y",), operators=(operator,), parameters=(), tensors=tensors)
    context = OperatorContext(graph=graph, layer=0, model_layer=0, operator=0, dtype=torch.bfloat16,
                      device=torch.device("cpu"), seed=0, slices=1)  # fmt: skip
    found = build_step(operator, context).call()
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
