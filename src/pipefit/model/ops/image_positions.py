"""image_positions(x_BTD, grid_BT4, table_ND, start_D?) -> x plus the position of every patch, for images of any size.

`grid` holds (row, column, rows, columns) for every token: the position of the patch in its image, and the number of
patches of the image. The learned table is for `rows` x `columns` patches; for an image of another size it is
interpolated: bicubic with a = -0.75, edges repeated, corners not aligned, no antialiasing. This is PyTorch's
`interpolate(mode="bicubic", align_corners=False)`, as in Hugging Face's ViT and SigLIP (the kernel: Keys, 1981,
equation 4). Row -1 marks the start token of an image (ViT's class token): its value is `start` plus the first row of
the table, and x is ignored.

With `aligned`, the interpolation is bilinear with aligned corners: PyTorch's `interpolate(mode="bilinear",
align_corners=True)`, as in Hugging Face's Qwen3-VL.

If a token stands for a square of `merge` x `merge` patches, x is (B, T, merge^2, D), row by row, and `grid` counts the
squares. All patches of a start token get its value.

Saves nothing: the sixteen table entries (bilinear: four) that a patch reads follow from its grid.
"""

from __future__ import annotations

from math import prod

from pipefit.model.ops.kind import OperatorCall, OperatorKind, same_shape


def _forward_extra(call: OperatorCall) -> int:
    """The sum of the entries in the wide dtype, and one entry per token."""
    return prod(call.outputs[0]) * (call.wide_bytes + call.compute_bytes)


OPERATORS = (
    OperatorKind(
        kind="image_positions",
        summary="x plus a learned table of positions, interpolated to the size of each image.",
        inputs=("x", "grid", "table", "start?"),
        attributes={
            "rows": "rows of patches in the table",
            "columns": "columns of patches in the table",
            "aligned": "absent, or true: bilinear with aligned corners, instead of bicubic",
            "merge": "absent, or the side in patches of the square that a token stands for",
        },
        shapes=same_shape,
        forward_extra=_forward_extra,
        backward_extra=_forward_extra,
        boundary=True,
    ),
)
