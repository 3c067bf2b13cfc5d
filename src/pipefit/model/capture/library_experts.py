"""Experts of `transformers` with rows apart, for the time of an export.

The library sorts the tokens of a batch by expert, so rows of different requests meet in one product. Experts with a
usual gate become the operator `experts`, as do those of Llama 4, DBRX and LongCat. With any other gate every expert
computes every token, and the weights of experts not selected are zero: results and gradients are equal, but all experts
are paid for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def separate_rows() -> Iterator[None]:
    """Replace all implementations of experts in `transformers`, if it is loaded."""
    library = sys.modules.get("transformers.integrations.moe")
    known = getattr(getattr(library, "ALL_EXPERTS_FUNCTIONS", None), "_global_mapping", {})
    before = dict(known)
    known.update(dict.fromkeys((*before, "eager"), run_library_experts))
    classes = [(owner, forward) for name, forward in FORWARDS.items() if (owner := _loaded_class(name)) is not None]
    forwards = [(owner, owner.forward) for owner, _ in classes]
    for owner, forward in classes:
        owner.forward = forward
    try:
        yield
    finally:
        known.clear()
        known.update(before)
        for owner, forward in forwards:
            owner.forward = forward


def _loaded_class(name: str) -> Any:
    """Return a class by `model type.class`; None if its module is not loaded."""
    kind, _, cls = name.partition(".")
    return getattr(sys.modules.get(f"transformers.models.{kind}.modeling_{kind}"), cls, None)


ACTIVATIONS: Mapping[str, str] = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh", "ReLU": "relu",
}  # fmt: skip
"""Class of an activation -> its name in operators."""


def run_library_experts(experts: Any, x_ND: Any, selected_NS: Any, weight_NS: Any) -> Any:
    """Call the operator `experts`, or compute all experts if the operator has no such gate."""
    from pipefit.model.families.leaf import call_operator

    activation = ACTIVATIONS.get(type(experts.act_fn).__name__) if hasattr(experts, "act_fn") else None
    gate = getattr(type(experts), "_apply_gate", None)
    usual = not experts.has_gate or getattr(gate, "__name__", "") == "_default_apply_gate"
    if activation is None or not usual or experts.has_post_expert_norm:
        return run_all_experts(experts, x_ND, selected_NS, weight_NS)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    tensors = [x_ND, selected_NS, weight_NS, getattr(experts, name), experts.down_proj]
    attributes = {"experts": experts.down_proj.shape[0], "gated": experts.has_gate, "activation": activation}
    if experts.is_transposed:
        attributes["transposed"] = ["up", "down"]
    if experts.has_bias:
        tensors += [getattr(experts, f"{name}_bias"), experts.down_proj_bias]
        attributes["more"] = ["gate_up_bias", "down_bias"]
    return call_operator(tensors, "experts", json.dumps(attributes, sort_keys=True))


def run_all_experts(experts: Any, x_ND: Any, selected_NS: Any, weight_NS: Any) -> Any:
    """The weighted sum of the experts' results; N tokens, D features, E experts, S selected ones of a token.

    A number beyond the last expert selects none.
    """
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    weight_NE = spread_weights(selected_NS, weight_NS, first.shape[0])
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden_ENF = _multiply(experts, name, x_ND, "nd")
    hidden_ENF = experts._apply_gate(hidden_ENF) if experts.has_gate else experts.act_fn(hidden_ENF)
    y_END = _multiply(experts, "down_proj", hidden_ENF, "end")
    if experts.has_post_expert_norm:
        y_END = experts.post_expert_norm(y_END)
    return (y_END * weight_NE.transpose(0, 1)[..., None].to(y_END.dtype)).sum(0).to(x_ND.dtype)


def _multiply(experts: Any, name: str, x: Any, labels: str) -> Any:
    import torch

    weight = getattr(experts, name)
    y_ENF = torch.einsum(f"{labels},{'edf' if experts.is_transposed else 'efd'}->enf", x, weight)
    return y_ENF + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else y_ENF


def run_llama4_experts(module: Any, x_BTD: Any) -> Any:
    """`Llama4TextMoe`: scores of the selected experts scale their inputs. Further experts would have inputs of zero."""
    import torch

    x_ND, router, experts = x_BTD.reshape(-1, module.hidden_dim), module.router, module.experts
    logits_NE = torch.nn.functional.linear(x_ND, router.weight, router.bias)
    top_NS, selected_NS = torch.topk(logits_NE, router.top_k, dim=1)
    score_NS = top_NS.float().sigmoid().to(top_NS.dtype)
    tensors = [x_ND, selected_NS, score_NS, experts.gate_up_proj, experts.down_proj]
    attributes = {"gated": True, "scaled": "inputs", "transposed": ["up", "down"]}
    y_ND = call_loop_experts(experts.act_fn, experts.num_experts, tensors, attributes)
    return module.shared_expert(x_ND) + y_ND, logits_NE


def run_dbrx_experts(experts: Any, x_BTD: Any, selected_NS: Any, weight_NS: Any) -> Any:
    """`DbrxExperts`: the weights of all experts are the rows of three matrices."""
    x_ND, mlp = x_BTD.reshape(-1, experts.hidden_size), experts.mlp
    tensors = [x_ND, selected_NS, weight_NS, mlp.w1, mlp.w2, mlp.v1]
    attributes = {"gated": True, "more": ["factor_weight"], "rows": experts.ffn_hidden_size, "transposed": ["down"]}
    return call_loop_experts(mlp.activation_fn, experts.num_experts, tensors, attributes).view(x_BTD.shape)


def call_loop_experts(act_fn: Any, count: int, tensors: list[Any], attributes: dict[str, Any]) -> Any:
    """Call the operator `experts`, or compute all experts if the operator has no such activation."""
    from pipefit.model.families.leaf import call_operator

    activation = ACTIVATIONS.get(type(act_fn).__name__)
    if activation is None:
        return run_all_loop_experts(act_fn, count, tensors, attributes)
    attributes = {**attributes, "activation": activation, "experts": count}
    return call_operator(tensors, "experts", json.dumps(attributes, sort_keys=True))


def run_all_loop_experts(act_fn: Any, count: int, tensors: list[Any], attributes: dict[str, Any]) -> Any:
    """The weighted sum of all experts without biases, whose down projections are (inputs, outputs)."""
    import torch

    x_ND, selected_NS, weight_NS, up, down, *factor = tensors
    weight_EN1 = spread_weights(selected_NS, weight_NS, count).transpose(0, 1)[..., None]
    if factor:
        parts = (torch.einsum("nd,efd->enf", x_ND, weight.view(count, -1, x_ND.shape[-1])) for weight in (up, *factor))
        gate_ENF, up_ENF = parts
    else:
        gate_ENF, up_ENF = torch.einsum("nd,edf->enf", x_ND, up).chunk(2, dim=-1)
    if attributes.get("scaled") == "inputs":
        gate_ENF, up_ENF, weight_EN1 = gate_ENF * weight_EN1, up_ENF * weight_EN1, torch.ones_like(weight_EN1)
    y_END = torch.einsum("enf,efd->end", act_fn(gate_ENF) * up_ENF, down.view(count, -1, x_ND.shape[-1]))
    return (y_END * weight_EN1).sum(0)


def run_longcat_experts(experts: Any, x_ND: Any, selected_NS: Any, weight_NS: Any) -> Any:
    """`LongcatFlashExperts`: a number beyond the last expert passes the token on."""
    from pipefit.model.families.leaf import call_operator

    count = experts.num_routed_experts
    passed_N1 = (weight_NS * (selected_NS >= count).to(weight_NS.dtype)).sum(-1, keepdim=True)
    attributes = json.dumps({"activation": ACTIVATIONS[type(experts.act_fn).__name__], "experts": count, "gated": True})
    tensors = [x_ND, selected_NS, weight_NS, experts.gate_up_proj, experts.down_proj]
    return call_operator(tensors, "experts", attributes) + x_ND * passed_N1.to(x_ND.dtype)


def spread_weights(selected_NS: Any, weight_NS: Any, count: int) -> Any:
    """Return the weight of every expert (N, E), zero where it is not selected."""
    import torch

    numbers_E = torch.arange(count, device=selected_NS.device)
    chosen_NSE = (selected_NS[..., None] == numbers_E).to(weight_NS.dtype)
    return (chosen_NSE * weight_NS[..., None]).sum(1)


FORWARDS: Mapping[str, Callable[..., Any]] = {
    "llama4.Llama4TextMoe": run_llama4_experts,
    "dbrx.DbrxExperts": run_dbrx_experts,
    "longcat_flash.LongcatFlashExperts": run_longcat_experts,
}
"""Classes with loops over experts of their own -> a forward with rows apart."""
