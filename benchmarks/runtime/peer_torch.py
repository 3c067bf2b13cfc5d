"""PyTorch's side of `engine_peers.py`: a plain Llama under PyTorch's own parallelism, with its fused AdamW.

`fully_shard` wraps the embedding, every layer and the head. The plans of `parallelize_module` are those of torchtitan:
vocabulary-parallel embedding, head and loss, and with sequence parallelism norms split along the tokens. Context
parallelism is `peer_context.py`. Gradients are clipped by `clip_grad_norm_`, foreach.

Shapes: B rows, T tokens, D features, H heads, G key/value heads, K features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.runtime.peer_case import (
    BETAS,
    EPS,
    LR,
    MAX_NORM,
    WEIGHT_DECAY,
    Case,
    Shape,
    TokenRows,
    random_gradients,
)
from benchmarks.runtime.peer_context import SequenceParts, attend_sequence


class PlainAttention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape, parts: SequenceParts | None) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)
        self.parts = parts

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q, k, v = (
            project(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (x * cos_TK + rotate_half(x) * sin_TK for x in (q, k))
        if self.parts is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = attend_sequence(q, k, v, self.parts)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class PlainMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape, parts: SequenceParts | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.self_attn = PlainAttention(shape, parts)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.mlp = PlainMLP(shape)

    def forward(self, x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_TK, sin_TK)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """tokens (B, T) -> logits (B, T, vocabulary). The names of parameters are those of Hugging Face."""

    def __init__(self, shape: Shape, parts: SequenceParts | None = None) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.model.layers = nn.ModuleList(PlainLayer(shape, parts) for _ in range(shape.layers))
        self.model.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos_TK, sin_TK)
        return self.lm_head(self.model.norm(x))


def rotate_half(x: Tensor) -> Tensor:
    """Return (-second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary_tables(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (T, K) of the rotary angles at these positions."""
    dim = shape.hidden // shape.heads
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle_TK = torch.outer(positions.float(), frequency).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


class TorchSide:
    """The plain module of this rank, with a batch that does not change.

    `step` runs one training step, or in a case of AdamW the update alone.
    """

    def __init__(self, case: Case, values: dict[str, Tensor]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = SequenceParts(case.shape.tokens, rank, size) if case.kind == "context" else None
        module = PlainLlama(case.shape, parts)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(values[name])
        rows = torch.from_numpy(TokenRows(case.shape).rows)
        rows = rows.chunk(size)[rank] if case.kind == "fsdp" else rows
        positions = torch.arange(case.shape.tokens) if parts is None else parts.positions
        self.tokens, self.labels = rows[:, positions].contiguous(), rows[:, 1 + positions].contiguous()
        self.cos, self.sin = rotary_tables(case.shape, positions)
        self.loss_context: Callable[[], Any] = nullcontext
        self.module: Any = module
        self.run: Any = module
        self.step: Callable[[], Any] = self._train
        WRAPPERS[case.kind](self, case)
        trained = list(self.module.parameters())
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def _train(self) -> Any:
        self.optimizer.zero_grad()
        with self.loss_context():
            logits = self.run(self.tokens, self.cos, self.sin)
            loss = functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten())
            del logits
            loss.backward()
        clip_gradients(self.module.parameters())
        self.optimizer.step()
        return loss.detach()

    def _update(self) -> Any:
        self.optimizer.step()
        return 0.0

    def mean_loss(self, loss: Any) -> float:
        """Return the loss of the global batch from that of this rank's tokens; all ranks call this together."""
        from torch.distributed.tensor import DTensor

        local = (loss.full_tensor() if isinstance(loss, DTensor) else torch.as_tensor(loss)).clone()
        dist.all_reduce(local)
        return float(local) / dist.get_world_size()

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the complete parameters; all ranks call this together."""
        from torch.distributed.tensor import DTensor

        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.module.named_parameters()
        }


def clip_gradients(parameters: Iterable[Any]) -> None:
    """Clip to a global norm of MAX_NORM. DTensors and replicated plain tensors are clipped by one common norm."""
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[Any]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    if len(kinds) == 1:
        nn.utils.clip_grad_norm_(*kinds.values(), MAX_NORM)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in kinds.values()]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    for group in kinds.values():
        nn.utils.clip_grads_with_norm_(group, MAX_NORM, torch.stack(plain).norm())


def shard_fully(side: TorchSide, case: Case) -> None:
    """Shard parameters, gradients and optimizer state: `fully_shard` by layer."""
    from torch.distributed.fsdp import fully_shard

    module = side.module
    for part in (module.model.embed_tokens, *module.model.layers, [module.model.norm, module.lm_head]):
        fully_shard(part)
    fully_shard(module)


def split_tensors(side: TorchSide, case: Case) -> None:
    """Split the layers: `parallelize_module`, with sequence parallelism if the case says so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (case.processes,))
    sequence = case.kind == "sequence"
    hidden = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "lm_head": ColwiseParallel(input_layouts=hidden, use_local_output=False),
    }
    for index in range(case.shape.layers):
        prefix = f"model.layers.{index}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[prefix + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[prefix + name] = RowwiseParallel(output_layouts=hidden)
        if sequence:
            plan[prefix + "input_layernorm"] = plan[prefix + "post_attention_layernorm"] = SequenceParallel()
            plan[prefix + "self_attn"] = PrepareModuleInput(
                input_layouts=(hidden, None, None), desired_input_layouts=(Replicate(), None, None)
            )
            plan[prefix + "mlp"] = PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),))
    if sequence:
        plan["model.norm"] = SequenceParallel()
    parallelize_module(side.module, mesh, plan)
    side.loss_context = loss_parallel


def split_sequence(side: TorchSide, case: Case) -> None:
    """Average the gradients of the parts of the sequences: `DistributedDataParallel`."""
    parallel = nn.parallel.DistributedDataParallel(side.module, init_sync=False, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # whose all-reduce gives the reducer no result
        parallel.register_comm_hook(None, finished_average)
    side.run = parallel


def finished_average(_, bucket):  # type: ignore[no-untyped-def] # PyTorch reads the annotations
    """Return the gradients of a bucket as if they were averaged."""
    finished: torch.futures.Future[Tensor] = torch.futures.Future()
    finished.set_result(bucket.buffer())
    return finished


def only_update(side: TorchSide, case: Case) -> None:
    """Give all parameters their gradients, for a step that only updates."""
    gradients = random_gradients(case.shape)
    for name, parameter in side.module.named_parameters():
        parameter.grad = gradients[name]
    side.step = side._update


WRAPPERS = {
    "fsdp": shard_fully, "tensor": split_tensors, "sequence": split_tensors, "context": split_sequence,
    "adamw": only_update,
}  # fmt: skip
