"""moe_shard(x, router, gate_up, down, more...): `moe` with local tokens and local experts on every device of the shard
axis, or of an expert axis and the shard axis together.

Every device routes its tokens and sends each pair's input to the device of its expert (an all-to-all-v whose counts are
exchanged first). It computes the received pairs of its own experts, sends the results back, and sums the weighted
results of its tokens. Shapes: x (B, T, D) of this device's tokens, router (E, D) replicated, gate_up (e, 2F, D), down
(e, D, F) of its e experts.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.lab.pace import pace_collective
from pipefit.model.graph import Operator
from pipefit.model.ops.moe import EXPERT_PARTS
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.moe import expert_weights, join_outputs, route_tokens, run_experts
from pipefit.run.ops.moe_routing import gate_function
from pipefit.run.sharded.parts import ShardContext
from pipefit.run.transfers import comms


class _ExchangeFunction(torch.autograd.Function):
    """Exchange of rows: the first `sent[0]` rows to device 0 and so on, `received[i]` rows from device i; the backward
    sends gradients in the reverse direction."""

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
    layer, gate = context.layer, gate_function(operator.attributes)
    parts = int(operator.attributes.get(EXPERT_PARTS, 1))
    shard: ShardContext | None = context.experts if parts > 1 else context.shard
    assert shard is not None, "experts of several devices in a stage without a shard axis"
    lengths = [stop - start for start, stop in context.shard.runs(experts // parts)] * parts
    local_experts = lengths[shard.position]

    def count_pairs(chosen: torch.Tensor) -> tuple[list[int], list[list[int]]]:
        """Return (pairs sent to every device, pairs received from every device for each local expert)."""
        mine = torch.bincount(chosen, minlength=experts)
        theirs = exchange_rows(mine, lengths, [local_experts] * len(lengths), shard).view(len(lengths), local_experts)
        return [int(part.sum()) for part in mine.split(lengths)], theirs.tolist()

    def run_moe_shard(
        record: SavedForward, x: torch.Tensor, router: Any, gate_up: Any, down: Any, *more: Any
    ) -> torch.Tensor:
        routed = route_tokens(operator, x, router, more, record, layer)
        sent, came = count_pairs(routed.expert)
        token = routed.order // top
        pairs: Any = _ExchangeFunction.apply(routed.flat[token], sent, [sum(counts) for counts in came], shard)
        expert = torch.arange(local_experts, device=x.device).repeat(len(came))
        numbers = torch.tensor(came, device=x.device).reshape(-1)
        expert, by_expert = expert.repeat_interleave(numbers).sort(stable=True)
        ends = torch.tensor(came).sum(0).cumsum(0).tolist()
        parameters = expert_weights(gate_up, down, gate, routed)
        out = run_experts(pairs[by_expert], expert, parameters, ends, record, layer)
        out = torch.zeros_like(out).index_copy(0, by_expert, out)
        out = _ExchangeFunction.apply(out, [sum(counts) for counts in came], sent, shard)
        return join_outputs(routed, routed.order, token, out).view(x.shape)

    return OperatorStep(run_moe_shard, wants_record=True)


BUILDERS = {"moe_shard": build_moe_shard}
