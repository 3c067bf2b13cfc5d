"""Experts that a user's own module keeps in one parameter, as classes of `transformers` do, and files in one tensor per
expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipefit.model.families import WeightTensor

STACKS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}
"""End of a stacked parameter -> names of its parts in files, in order along dimension 1; one of several spellings."""


def expert_tensors(
    name: str, shape: Sequence[int], is_stored: Callable[[str], bool]
) -> tuple[WeightTensor, ...] | None:
    """Return the tensors of a stacked parameter (E, rows, columns) with one tensor per expert; None if the files have
    no such tensors."""
    experts, _, end = name.rpartition(".")
    if len(shape) != 3:
        return None
    for parts in STACKS.get(end, ()):
        if is_stored(f"{experts}.0.{parts[0]}.weight"):
            rows = shape[1] // len(parts)
            return tuple(
                WeightTensor(f"{experts}.{expert}.{part}.weight", (expert, (place * rows, (place + 1) * rows)))
                for expert in range(shape[0])
                for place, part in enumerate(parts)
            )
    return None
