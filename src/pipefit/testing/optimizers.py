"""The conformance suite of an optimizer: `check_optimizer` compares it with an independent implementation in float64.

It also checks the stated bytes of the state, that the gradient stays as it is, and that results do not depend on the
pieces into which ranks cut the parameters. Imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pipefit.layout import Box
from pipefit.optimizers import FlatPiece, OptimizerKind, OptimizerState, ParameterPart, base, read_options
from pipefit.testing.labelled import call_labelled, require
from pipefit.testing.thread_group import ThreadGroup, UnmatchedCallError

SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (7, 12), "bias": (12,), "experts": (3, 4, 5), "scale": ()}
"""Parameters of the examples."""

STEPS, LEARNING_RATE = 6, 1e-2
SHORT_RUN = 10
"""Elements of a run in which an elementwise update of a small piece is divided."""


class ReferenceOptimizer(Protocol):
    """An optimizer as `torch.optim` has them: it reads `grad` and changes the parameters in place."""

    def step(self) -> Any: ...


Piece = Sequence[tuple[str, Box, tuple[int, int]]]
"""The parts of one rank: (parameter, box on its device, run of the box's elements)."""


def check_optimizer(
    kind: OptimizerKind,
    reference: Callable[[Sequence[nn.Parameter]], ReferenceOptimizer],
    options: Mapping[str, float] | None = None,
    tolerance: float = 1e-11,
) -> None:
    """Raise AssertionError if an optimizer differs from `reference(parameters)`, which has the learning rate 0.01.

    `options` are those of `kind`, such as `{"weight_decay": 0.1}`. The optimizer need not be registered. `tolerance` is
    relative to the largest value.
    """
    require(isinstance(kind, OptimizerKind), f"an OptimizerKind, not {type(kind).__name__}")
    chosen = {"lr": LEARNING_RATE, **(options or {})}
    expected = _run_reference(reference)
    moved = max(float((expected[name] - value).abs().max()) for name, value in _draw_values().items())
    require(moved > 0, f"{kind.name}: the reference changes no parameter")
    largest = max(float(value.abs().max()) for value in expected.values())
    for subject, pieces in _list_cuts().items():
        for limit in (1 << 18, SHORT_RUN):
            with patch.object(base, "update_elements", lambda device, limit=limit: limit):
                values = _run_pieces(kind, pieces, chosen, f"{kind.name}, {subject}")
            for name, value in values.items():
                error = float((value - expected[name]).abs().max())
                near = error <= tolerance * largest
                require(near, f"{kind.name}, {subject}, runs of {limit}: {name} is off by {error:.2g}")
    for dtype, master in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        check_optimizer_bytes(kind, dtype, master, chosen)


def check_optimizer_bytes(
    kind: OptimizerKind, dtype: torch.dtype, master: torch.dtype, options: Mapping[str, float]
) -> None:
    """Raise AssertionError unless the state of a piece, after an update, has the bytes that the kind states."""
    piece = _make_piece(_list_cuts()["one piece"][0], _draw_values(), lambda values: None, dtype, master)
    state = _make_state(kind, piece, options, kind.name)
    gradient = torch.ones_like(piece.parameter, dtype=master)
    call_labelled(f"{kind.name}: step", state.step, gradient, LEARNING_RATE, 1)
    free = {tensor.untyped_storage().data_ptr() for tensor in (piece.parameter, gradient)}
    tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in _iterate_tensors(vars(state))}
    held = sum(tensor.untyped_storage().nbytes() for key, tensor in tensors.items() if key not in free)
    width = torch.finfo(master).bits // 8
    stated = piece.parameter.numel() * kind.element_state_bytes(width, dtype != master)
    stated += sum(kind.shared_state_bytes(shape, width) for shape in SHAPES.values())
    require(held == stated, f"{kind.name} in {dtype}: the state has {held} bytes, and the kind states {stated}")


def _run_reference(reference: Callable[[Sequence[nn.Parameter]], ReferenceOptimizer]) -> dict[str, Tensor]:
    """Return the parameters after all steps of the reference."""
    parameters = {name: nn.Parameter(value) for name, value in _draw_values().items()}
    optimizer = call_labelled("the reference", reference, list(parameters.values()))
    for step in range(STEPS):
        for name, gradient in _draw_gradients(step).items():
            parameters[name].grad = gradient
        call_labelled("step of the reference", optimizer.step)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _run_pieces(
    kind: OptimizerKind, pieces: Sequence[Piece], options: Mapping[str, float], subject: str
) -> dict[str, Tensor]:
    """Return the parameters after all steps of pieces that run at the same time, as ranks do."""
    group = ThreadGroup(len(pieces))
    values = _draw_values()

    def add_up(number: int, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(group.exchange_values(number, tensor.clone())).sum(0))

    def run_piece(number: int) -> FlatPiece:
        piece = _make_piece(pieces[number], values, partial(add_up, number), torch.float64, torch.float64)
        state = _make_state(kind, piece, options, subject)
        for step in range(STEPS):
            gradient = _make_piece(
                pieces[number], _draw_gradients(step), lambda tensor: None, torch.float64, torch.float64
            ).parameter
            before = gradient.clone()
            call_labelled(f"{subject}: step", state.step, gradient, LEARNING_RATE, step + 1)
            require(torch.equal(gradient, before), f"{subject}: the update changes the gradient")
        return piece

    try:
        results = group.run_threads(run_piece)
    except UnmatchedCallError:
        raise AssertionError(f"{subject}: the pieces do not call sum_parts equally often") from None
    joined = {name: value.clone() for name, value in values.items()}
    for piece in results:
        for part in piece.parts:
            target = joined[part.name][tuple(slice(*edge) for edge in part.box)]
            flat = target.flatten()
            flat[slice(*part.local)] = piece.parameter[slice(*part.place)]
            target.copy_(flat.view(target.shape))
    return joined


def _make_state(kind: OptimizerKind, piece: FlatPiece, options: Mapping[str, float], subject: str) -> OptimizerState:
    state = call_labelled(f"{subject}: state", kind.state, kind, piece, read_options(kind, options))
    require(isinstance(state, OptimizerState), f"{subject}: state returns {type(state).__name__}, not OptimizerState")
    return state  # type: ignore[no-any-return]


def _make_piece(
    parts: Piece,
    values: Mapping[str, Tensor],
    sum_parts: Callable[[Tensor], None],
    dtype: torch.dtype,
    master: torch.dtype,
) -> FlatPiece:
    """Return a flat piece of these parts, with the elements of `values`."""
    flats, described, start = [], [], 0
    for name, box, (low, high) in parts:
        flats.append(values[name][tuple(slice(*edge) for edge in box)].flatten()[low:high])
        described.append(ParameterPart(name, SHAPES[name], box, (low, high), (start, start + high - low)))
        start += high - low
    return FlatPiece(
        parameter=torch.cat(flats).to(dtype),
        master_dtype=master,
        decays=True,
        shapes=SHAPES,
        parts=tuple(described),
        sum_parts=sum_parts,
    )


def _list_cuts() -> dict[str, list[Piece]]:
    """Return the pieces of one rank, of replicas that shard a flat buffer, and of devices that hold columns."""
    boxes: dict[str, Box] = {name: tuple((0, size) for size in shape) for name, shape in SHAPES.items()}
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    flat, start = [], 0
    for name, size in sizes.items():
        flat.append((name, start, start + size))
        start += size
    edges = (0, 29, 101, start)
    replicas: list[Piece] = [
        [
            (name, boxes[name], (max(low, first) - first, min(high, last) - first))
            for name, first, last in flat
            if max(low, first) < min(high, last)
        ]
        for low, high in itertools.pairwise(edges)
    ]
    columns: list[Piece] = [[], []]
    for name, shape in SHAPES.items():
        cut = shape[-1] // 3 if len(shape) > 1 else 0
        for device, edge in enumerate(((0, cut), (cut, shape[-1])) if cut else ()):
            box = (*boxes[name][:-1], edge)
            columns[device].append((name, box, (0, math.prod(stop - begin for begin, stop in box))))
        if not cut:
            columns[0].append((name, boxes[name], (0, sizes[name])))
    single: Piece = [(name, boxes[name], (0, sizes[name])) for name in SHAPES]
    return {"one piece": [single], "three replicas": replicas, "two devices with columns": columns}


def _draw_values() -> dict[str, Tensor]:
    return _draw_tensors(4)


def _draw_gradients(step: int) -> dict[str, Tensor]:
    """Return gradients of all sizes, the same for a step in every call."""
    return {name: value * 10.0 ** (step % 3 - 2) for name, value in _draw_tensors(5 + step).items()}


def _draw_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def _iterate_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iterate_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iterate_tensors(item)
