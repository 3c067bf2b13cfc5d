"""Every optimizer on flat pieces against `torch.optim`: values, and the bytes of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipefit.cost.static_memory import STATE_BYTES, has_master
from pipefit.errors import PlanError, RunError
from pipefit.optimizers import OPTIMIZERS, FlatPiece, OptimizerKind, ParameterPart, find_optimizer, read_options
from pipefit.optimizers.adamw import AdamWOptions, fused_update
from pipefit.optimizers.base import register_optimizer
from pipefit.run.stage.memory_audit import AllocationAudit

SHAPES = {"matrix": (7, 12), "bias": (12,), "experts": (3, 4, 5), "scale": ()}


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, **options)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.8, 0.9), eps=1e-7, weight_decay=options.get("weight_decay", 0.1)
    )


def adafactor(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-6, 1e-3), **options)


CASES: dict[str, tuple[str, Any, dict[str, float], dict[str, Any]]] = {
    "adamw": ("adamw", adamw, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-7}, {"weight_decay": 0.07}),
    "sgd": ("sgd", sgd, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.05}),
    "sgd, dampened": (
        "sgd", sgd, {"momentum": 0.8, "dampening": 0.3}, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.0},
    ),
    "sgd, nesterov": (
        "sgd", sgd, {"momentum": 0.9, "nesterov": 1}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adafactor": ("adafactor", adafactor, {"eps": 1e-6}, {"weight_decay": 0.1}),
}  # fmt: skip


def piece_of(tensors: dict[str, torch.Tensor]) -> FlatPiece:
    """All parameters, one behind the other, in one piece."""
    flat, parts, start = torch.cat([tensor.flatten() for tensor in tensors.values()]), [], 0
    for name, tensor in tensors.items():
        box = tuple((0, size) for size in tensor.shape)
        place = (start, start + tensor.numel())
        parts.append(ParameterPart(name, tuple(tensor.shape), box, (0, tensor.numel()), place))
        start += tensor.numel()
    return FlatPiece(
        parameter=flat,
        master_dtype=flat.dtype,
        decays=True,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        parts=tuple(parts),
    )


def state_of(kind: OptimizerKind, tensors: dict[str, torch.Tensor], options: dict[str, float]) -> Any:
    return kind.state(kind, piece_of(tensors), read_options(kind, options))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("limit", [1 << 18, 10])
def test_updates_equal_pytorchs(case: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over eight steps with gradients of all sizes, also with runs of a few elements at a time."""
    for module in ("base", "adafactor"):
        monkeypatch.setattr(f"pipefit.optimizers.{module}.update_elements", lambda device: limit)
    name, make, options, theirs_options = CASES[case]
    generator = torch.Generator().manual_seed(4)
    tensors = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in SHAPES.items()}
    theirs = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
    other = make(theirs.values(), **theirs_options)
    options = {**options, "lr": 1e-2, "weight_decay": theirs_options["weight_decay"]}
    mine = state_of(find_optimizer(name), tensors, options)
    for step in range(8):
        gradients = [
            torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3 - 2)
            for shape in SHAPES.values()
        ]
        for parameter, gradient in zip(theirs.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        other.step()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        before = flat.clone()
        mine.step(flat, 1e-2, step + 1)
        assert torch.equal(flat, before), "the gradient was changed"
    wanted = torch.cat([parameter.detach().flatten() for parameter in theirs.values()])
    moved = torch.cat([tensor.flatten() for tensor in tensors.values()]) - wanted
    assert (mine.parameter - wanted).abs().max() <= 1e-11 * wanted.abs().max() and moved.abs().max() > 1e-2


@pytest.mark.parametrize("limit", [1 << 18, 10])
def test_adamw_without_a_fused_kernel_equals_pytorchs(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: one kernel after the other."""
    monkeypatch.setattr("pipefit.optimizers.adamw.has_fused_kernel", lambda device: False)
    test_updates_equal_pytorchs("adamw", limit, monkeypatch)


def test_adamw_on_a_cpu_has_the_bits_of_pytorchs_fused_one_and_no_temporary_tensors() -> None:
    elements = 1 << 15
    draw = torch.Generator().manual_seed(2)
    value, gradient = (torch.randn(elements, generator=draw) for _ in range(2))
    theirs = torch.nn.Parameter(value.clone())
    theirs.grad = gradient.clone()
    other = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    mine = state_of(find_optimizer("adamw"), {"matrix": value}, {"beta1": 0.8, "beta2": 0.9})
    for step in range(3):
        other.step()
        with AllocationAudit() as audit:
            mine.step(gradient, 1e-2, step + 1)
        assert audit.peak_bytes < elements
    assert torch.equal(mine.parameter, theirs) and not torch.equal(theirs, value)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_an_element_of_adamw_has_the_same_bits_wherever_its_piece_begins(precision: torch.dtype) -> None:
    """Copies of a parameter on unequal meshes lie in pieces that begin and end elsewhere."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.rand(1003, generator=draw, dtype=precision) for _ in range(4)]
    options, settings = AdamWOptions(), (1e-2, 0.1, 7)
    complete, cut = [tensor.clone() for tensor in tensors], [tensor.clone() for tensor in tensors]
    fused_update(complete[0], complete[1], (complete[2], complete[3]), settings, options)
    for start, stop in ((0, 3), (3, 130), (130, 131), (131, 777), (777, 1003)):
        pieces = [tensor[start:stop] for tensor in cut]
        fused_update(pieces[0], pieces[1], (pieces[2], pieces[3]), settings, options)
    for expected, tensor in zip(complete, cut, strict=True):
        assert torch.equal(expected, tensor)
    assert not torch.equal(complete[0], tensors[0]) and torch.equal(complete[1], tensors[1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_state_bytes_are_those_of_pytorchs_state(case: str, precision: Any) -> None:
    name, make, _, theirs_options = CASES[case]
    kind, width = find_optimizer(name), STATE_BYTES[precision]
    theirs = {key: torch.ones(shape, dtype=getattr(torch, precision)).requires_grad_() for key, shape in SHAPES.items()}
    other = make(theirs.values(), **theirs_options)
    for parameter in theirs.values():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    mine = state_of(kind, {key: value.detach() for key, value in theirs.items()}, {})
    counted = 0
    for parameter in theirs.values():
        held = [value for key, value in other.state[parameter].items() if key != "step" and value is not None]
        bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in held)
        shape = tuple(parameter.shape)
        stated = parameter.numel() * kind.element_state_bytes(width, has_master(precision))
        assert stated + kind.shared_state_bytes(shape, width) == bytes_, shape
        counted += bytes_
    tensors = [*mine.moments.values(), *mine.shared.values()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == counted > 0


def test_masters_count_under_bfloat16() -> None:
    bytes_ = {name: kind.element_state_bytes(4, has_master("bfloat16")) for name, kind in OPTIMIZERS.items()}
    assert bytes_ | {"adamw": 12, "sgd": 8, "adafactor": 4} == bytes_


def test_an_unknown_optimizer_and_a_taken_name_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        find_optimizer("adamv", "--optimizer")
    text = error.value.full_text()
    assert ", ".join(sorted(OPTIMIZERS)) in text and "did you mean 'adamw'?" in text and "--optimizer" in text
    kind = find_optimizer("sgd")
    assert register_optimizer(kind) is kind
    other = OptimizerKind(name="sgd", summary="another", options=kind.options, state=kind.state)
    with pytest.raises(PlanError, match="Two optimizers have one name"):
        register_optimizer(other)
    assert find_optimizer("sgd") is kind


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("sgd", "momentum", 1.0),
        ("sgd", "dampening", -0.5),
        ("adafactor", "clip", 0.5),
        ("adafactor", "beta2_decay", 0.1),
        ("adafactor", "eps", 0.0),
        ("adafactor", "eps_scale", float("nan")),
        ("adamw", "beta1", -1.0),
    ],
)
def test_options_outside_their_limits_are_refused(name: str, option: str, value: float) -> None:
    with pytest.raises(RunError) as error:
        read_options(find_optimizer(name), {option: value})
    assert f"--optimizer-option {option}" in error.value.full_text() and "allowed:" in error.value.full_text()


def test_an_option_of_another_optimizer_is_refused() -> None:
    with pytest.raises(RunError) as error:
        read_options(find_optimizer("sgd"), {"beta1": 0.9})
    assert "The optimizer sgd has no such option" in error.value.full_text()
    assert "momentum=0.9" in error.value.full_text()
