"""moe_shard(x, router, gate_up, down): `moe` where every device of the shard axis has its tokens and its experts.

Every device routes its tokens, sends a pair's input to the device of its expert (an all-to-all-v whose counts are
exchanged first), computes what has come for its own experts, sends the results back, and weights and adds them up.
Shapes: x (B, T, D) of this device's tokens, router (E, D) whole, gate_up (e, 2F, D), down (e, D, F) of its e experts.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.lab.pace import pace_collective
from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.moe import ACTIVATIONS, apply_linear, run_experts
from pipefit.run.sharded.parts import ShardContext
from pipefit.run.transfers import comms


class _ExchangeFunction(torch.autograd.Function):
    """Rows to other devices: `sent[i]` of them to device i, in order, `received[i]` from it; backward the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], shard: ShardContext) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.shard = sent, received, shard
        return exchange_rows(x, sent, received, shard)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return exchange_rows(dy, ctx.received, ctx.sent, ctx.shard), None, None, None


def exchange_rows(x: torch.Tensor, sent: list[int], received: list[int], shard: ShardContext) -> torch.Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    pace_collective(lambda: comms.exchange(out, x.contiguous(), received, sent, shard.group))
    return out


def build_moe_shard(operator: Operator, context: OperatorContext) -> OperatorStep:
    experts, top = int(operator.attributes["experts"]), int(operator.attributes["top_k"])
    normalize, activation = bool(operator.attributes["normalize"]), ACTIVATIONS[operator.attributes["activation"]]
    layer, shard = context.layer, context.shard
    assert shard is not None, "experts of several devices in a stage without a shard axis"
    wide = torch.promote_types(context.dtype, torch.float32)
    lengths = [stop - start for start, stop in shard.runs(experts)]
    own = lengths[shard.position]

    def count_pairs(chosen: torch.Tensor) -> tuple[list[int], list[list[int]]]:
        """(pairs that go to every device, pairs that come from every device for each of the own experts)."""
        mine = torch.bincount(chosen, minlength=experts)
        theirs = exchange_rows(mine, lengths, [own] * len(lengths), shard).view(len(lengths), own)
        return [int(part.sum()) for part in mine.split(lengths)], theirs.tolist()

    def run_moe_shard(record: SavedForward, x: torch.Tensor, router: Any, gate_up: Any, down: Any) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.softmax(apply_linear(flat, router, None, record, layer), -1, dtype=wide).topk(top, -1)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen, order = chosen.reshape(-1).sort(stable=True)
        sent, came = count_pairs(chosen)
        token = order // top
        pairs: Any = _ExchangeFunction.apply(flat[token], sent, [sum(each) for each in came], shard)
        expert = torch.arange(own, device=x.device).repeat(len(came))
        numbers = torch.tensor(came, device=x.device).reshape(-1)
        by_expert = expert.repeat_interleave(numbers).sort(stable=True).indices
        ends = torch.tensor(came).sum(0).cumsum(0).tolist()
        out = run_experts(pairs[by_expert], gate_up, down, activation, ends, record, layer)
        out = torch.zeros_like(out).index_copy(0, by_expert, out)
        out = _ExchangeFunction.apply(out, [sum(each) for each in came], sent, shard)
        out = out * weights.to(x.dtype).reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, out).view(x.shape)

    return OperatorStep(run_moe_shard, wants_record=True)


BUILDERS = {"moe_shard": build_moe_shard}
