"""Runs of the windows of a packed row."""

from __future__ import annotations

import torch

from pipefit.model.ops.kind import OperatorCall
from pipefit.model.ops.table import KINDS
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops.packed_attention import window_runs
from pipefit.run.stage_inputs import StageInputs


def test_windows_end_with_the_image_and_with_the_square() -> None:
    """An image of 2 x 3 tokens and one of 1 x 1 in windows of 2 x 2, and the equal entries of a profile."""
    places = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [1, 2], [1, 3]]
    grid = torch.tensor([[[*place, 2, 3] for place in places], [[0] * 4] * 7])
    documents = torch.tensor([[0] * 6 + [6], [0] * 7])
    record = SavedForward(0, 0, StageInputs(image_lengths=(6, 1)), train=True)
    assert window_runs(record, documents, grid, 2) == [[(0, 4), (4, 6), (6, 7)], [(0, 4), (4, 7)]]


def test_windows_bound_the_flops() -> None:
    heads = (1, 100, 4, 3, 8)
    for images, keys in ((10_000, 4), (200, 2)):
        call = OperatorCall(
            inputs=(heads, heads, heads, (1, 100), (1, 100, 4)),
            outputs=(heads,),
            attributes={"scale": 1.0, "window": 2},
            symbols={"squares": images},
            compute_bytes=2,
        )
        assert KINDS["packed_attention"].flops(call).forward == 4 * 100 * keys * 4**2 * 3 * 8
