"""The conformance suite of optimizers: built-in ones and the page's pass it, and each fault fails its check."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pipefit.optimizers import (
    OPTIMIZERS,
    ElementwiseState,
    OptimizerKind,
    OptimizerOptions,
    OptimizerState,
    find_optimizer,
)
from pipefit.testing.optimizers import check_optimizer

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "add-an-optimizer.md"


class PlainState(ElementwiseState):
    def update_run(self, value, gradient, moments, lr, count) -> None:
        value.add_(gradient, alpha=-lr)


PLAIN = OptimizerKind(name="plain", summary="SGD", options=OptimizerOptions, state=PlainState)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def test_built_in_optimizers_pass() -> None:
    check_optimizer(PLAIN, sgd)
    check_optimizer(find_optimizer("sgd"), lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), {"momentum": 0.9})
    check_optimizer(
        find_optimizer("adamw"),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1),
        {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1},
    )
    check_optimizer(
        find_optimizer("adafactor"),
        lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-6, 1e-3), weight_decay=0.1),
        {"eps": 1e-6, "weight_decay": 0.1},
    )


class TrustRatios:
    """Every parameter at once, with the norms of torch."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter -= 1e-2 * torch.linalg.norm(parameter) / torch.linalg.norm(parameter.grad) * parameter.grad


def test_the_optimizers_of_the_page_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS))
    module = ModuleType("how_to_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in re.findall(r"^```python\n(.*?)^```", HOW_TO.read_text(encoding="utf-8"), flags=re.M | re.S):
        exec(block, vars(module))
    check_optimizer(find_optimizer("trust"), TrustRatios)
    vars(module)["TrustState"].step = without_sums(vars(module)["TrustState"].step)
    with pytest.raises(AssertionError, match="trust, three replicas, runs of 262144: matrix is off by"):
        check_optimizer(find_optimizer("trust"), TrustRatios)


def without_sums(step: Any) -> Any:
    """Return a step whose pieces each take their own norms."""

    def step_alone(state: OptimizerState, gradient: torch.Tensor, lr: float, count: int) -> None:
        state.piece = replace(state.piece, sum_parts=lambda values: None)  # type: ignore[attr-defined]
        step(state, gradient, lr, count)

    return step_alone


class DoubledState(PlainState):
    def update_run(self, value, gradient, moments, lr, count) -> None:
        value.add_(gradient, alpha=-2 * lr)


class ScaledGradientState(PlainState):
    def step(self, gradient, lr, count) -> None:
        self.master.add_(gradient.mul_(lr), alpha=-1)
        self.round_master()


class HoardingState(PlainState):
    def step(self, gradient, lr, count) -> None:
        self.last = gradient.clone()
        PlainState.step(self, gradient, lr, count)


class LonelyState(PlainState):
    """A state whose first piece alone calls `sum_parts`."""

    def __init__(self, optimizer, piece, options) -> None:
        PlainState.__init__(self, optimizer, piece, options)
        self.sum_parts = piece.sum_parts if "matrix" in {part.name for part in piece.parts} else None

    def step(self, gradient, lr, count) -> None:
        if self.sum_parts is not None:
            self.sum_parts(self.master.new_zeros(1))
        PlainState.step(self, gradient, lr, count)


class CountedRunsState(PlainState):
    def update_run(self, value, gradient, moments, lr, count) -> None:
        value.add_(gradient * value.numel() / 171, alpha=-lr)


FAULTS = {
    "another rate": (replace(PLAIN, state=DoubledState), "plain, one piece, runs of 262144: matrix is off by"),
    "the gradient": (replace(PLAIN, state=ScaledGradientState), "the update changes the gradient"),
    "hidden state": (replace(PLAIN, state=HoardingState), "the state has 1256 bytes, and the kind states 0"),
    "unequal sums": (
        replace(PLAIN, state=LonelyState),
        "plain, three replicas: the pieces do not call sum_parts equally often",
    ),
    "unequal runs": (replace(PLAIN, state=CountedRunsState), "is off by"),
    "no state": (replace(PLAIN, state=lambda kind, piece, options: None), "state returns NoneType"),
    "arity": (replace(PLAIN, state=lambda kind: None), "plain, one piece: state raises TypeError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_names_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.testing.thread_group.BARRIER_S", 0.5)
    kind, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        check_optimizer(kind, sgd)


def test_a_reference_that_does_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="the reference changes no parameter"):
        check_optimizer(PLAIN, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    with pytest.raises(AssertionError, match="the reference raises TypeError"):
        check_optimizer(PLAIN, lambda: None)  # type: ignore[misc,arg-type]
