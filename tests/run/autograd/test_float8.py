"""Products in FP8: against products of the rounded factors, the sizes that kernels take, a layer against autograd, and
training with stages, replicas and shards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.errors import RunError
from pipefit.precision import Precision
from pipefit.run.autograd.float8 import float8_types, has_scaled_product, pad_rows, quantize_factor, scaled_product
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops.linear import accumulate_linear, apply_linear
from pipefit.run.stage.products import use_product_type

VALUE_TYPE, GRADIENT_TYPE = float8_types(torch.device("cpu"))
pytestmark = pytest.mark.skipif(not has_scaled_product(torch.device("cpu")), reason="torch multiplies no FP8 here")


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that an FP8 factor stands for, in float64."""
    scale = values.double().abs().max() / torch.finfo(dtype).max
    return (values.double() / scale).float().to(dtype).double() * scale


def draw(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_factor_keeps_its_largest_value() -> None:
    values = draw(32, 48) * 1000
    factor, scale = quantize_factor(values, VALUE_TYPE)
    assert factor.dtype == VALUE_TYPE and scale.dtype == torch.float32
    assert (factor.float() * scale).abs().max() == pytest.approx(float(values.abs().max()), rel=1e-3)
    empty, scale = quantize_factor(torch.zeros(16, 16), VALUE_TYPE)
    assert not empty.float().any() and scale > 0


@pytest.mark.parametrize("gradient", [False, True])
def test_products_are_those_of_the_rounded_factors(gradient: bool) -> None:
    left, right = draw(24, 64), draw(48, 64, seed=1)
    wanted = rounded(left, GRADIENT_TYPE if gradient else VALUE_TYPE) @ rounded(right, VALUE_TYPE).t()
    product = scaled_product(left, right, torch.float32, gradient)
    assert product.shape == (24, 48) and torch.allclose(product.double(), wanted, rtol=1e-3, atol=1e-3)
    exact = left.double() @ right.double().t()
    assert 0.001 < float((product - exact).norm() / exact.norm()) < 0.1, "rounded, and not far off"
    assert scaled_product(left, right).dtype == torch.bfloat16
    assert scaled_product(left[:0], right).shape == (0, 48), "no rows"


def linear_results(narrow: bool, rows: int = 32) -> dict[str, torch.Tensor]:
    """Return result and gradients of a linear layer with a bias."""
    x, weight, bias = draw(2, rows // 2, 64), draw(48, 64, seed=1), draw(48, seed=2)
    parameters = [torch.nn.Parameter(value) for value in (weight, bias)]
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    x.requires_grad_(True)
    record = SavedForward.__new__(SavedForward)
    record.deferred = None  # type: ignore[attr-defined]
    accumulate = partial(accumulate_linear, narrow=narrow)
    y: Any = apply_linear(x, *parameters, record, 0, accumulate, narrow)
    y.backward(draw(2, rows // 2, 48, seed=3))
    assert x.grad is not None
    sums = {name: p.main_grad for name, p in zip(("weight", "bias"), parameters, strict=True)}  # type: ignore[attr-defined]
    return {"y": y.detach(), "x": x.grad, **sums}


@pytest.mark.parametrize("rows", [32, 34])
def test_a_layer_in_fp8_is_near_one_in_bfloat16(rows: int) -> None:
    """34 rows are no multiple of 16: the product of the weight gradient gets rows of zeros."""
    narrow, wide = linear_results(True, rows), linear_results(False, rows)
    for name, value in wide.items():
        error = float((narrow[name].float() - value.float()).norm() / value.float().norm())
        assert error == 0 if name == "bias" else 0.002 < error < 0.1, (name, error)
    assert pad_rows(draw(rows, 8)).shape == (48 if rows == 34 else 32, 8)


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.run.stage.products.has_scaled_product", lambda device: False)
    with pytest.raises(RunError, match="cannot multiply matrices in FP8") as error:
        use_product_type("fp8", torch.device("cpu"))
    assert "--precision bfloat16" in str(error.value) and "Hopper" in str(error.value)
    use_product_type("float32", torch.device("cpu"))


def trained(gloo_pool: Any, precision: Precision, **choices: Any) -> list[float]:
    """Return the losses of three steps. The plan is made in bfloat16: processors have no peak for FP8."""
    plan = plans.plan("llama", replace(plans.JOB, precision="bfloat16"), **choices)
    plan = replace(plan, job=replace(plan.job, precision=precision))
    gloo_pool.run(cases.prepare, [(plan, plans.model("llama"))], ranks=gloo_pool.size)
    arguments = (plan, plans.model("llama"), plans.VOCABULARY, (0, 3))
    return [
        loss for loss, _ in gloo_pool.run(cases.uninterrupted, *arguments, ranks=len(plan.used_devices))[0]["steps"]
    ]


LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "microbatches": 4},
    "split backward": {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
    "replicas, ZeRO-3": {"replicas": (1, 1), "microbatches": 2, "sharded_state": "parameters"},
    "shards": {"shards": (1, 1), "sharding": "megatron", "microbatches": 2},
    "full recomputation": {"stages": 2, "microbatches": 4, "recompute": ("full",)},
}


@pytest.mark.gloo
def test_layouts_agree_in_fp8(gloo_pool: Any) -> None:
    """Scales depend on the parts that a device holds, so losses agree to the rounding of FP8, and no closer."""
    alone = trained(gloo_pool, "fp8", microbatches=4)
    wide = trained(gloo_pool, "bfloat16", microbatches=4)
    assert alone != wide, "blocks run in FP8"
    for name, choices in LAYOUTS.items():
        losses = trained(gloo_pool, "fp8", **choices)
        assert losses[0] != trained(gloo_pool, "bfloat16", **choices)[0], f"{name}: blocks run in FP8"
        assert losses[0] == pytest.approx(alone[0], rel=5e-3), name
        assert losses == pytest.approx(alone, rel=4e-2), name
    assert wide == pytest.approx(alone, rel=2e-2)
