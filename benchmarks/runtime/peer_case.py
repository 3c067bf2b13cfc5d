"""The cases of `engine_peers.py`, and pipefit's side of them: a plan with one axis fixed, and the worker of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.processes.fixed_machine import FIXED_MACHINE

KINDS = ("fsdp", "tensor", "sequence", "context", "adamw")

LR, WEIGHT_DECAY, BETAS, EPS, MAX_NORM = 1e-3, 0.1, (0.9, 0.95), 1e-8, 1.0
"""AdamW of both sides. The gradients of a step are clipped to a global norm, as `pipefit train` does by default."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama model in float32 and its batch."""

    layers: int = 4
    hidden: int = 384
    inner: int = 1024
    heads: int = 8
    groups: int = 4
    vocabulary: int = 2048
    rows: int = 4
    tokens: int = 256

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as Hugging Face writes it."""
        return {
            "model_type": "llama", "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups, "max_position_embeddings": self.tokens, "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        }  # fmt: skip


FULL, QUICK = Shape(), Shape(layers=1, hidden=32, inner=64, heads=4, vocabulary=64, tokens=16)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    kind: str
    processes: int
    shape: Shape

    def constraints(self) -> Any:
        """Return the constraints that fix the parallelism of the plan, as `--fix` does."""
        from pipefit.plan.request.constraints import Constraints

        even = (1,) * self.processes
        fixed: dict[str, dict[str, Any]] = {
            "fsdp": {"replicas": even, "sharded_state": "parameters"},
            "tensor": {"shards": even, "sharding": "megatron"},
            "sequence": {"shards": even, "sharding": "megatron-sp"},
            "context": {"context": self.processes},
            "adamw": {"replicas": even},
        }
        layout = {"replicas": (1,), "shards": (1,), "context": 1, "sharded_state": "none"} | fixed[self.kind]
        return Constraints(stages=1, microbatches=1, recompute=("none",), **layout)


def plan_case(case: Case) -> tuple[Any, Any]:
    """Return the model and its plan."""
    from pipefit.cluster import local_cluster
    from pipefit.model.registry import describe_config, open_family
    from pipefit.plan.make import make_plan
    from pipefit.plan.types import Job

    described = describe_config(case.shape.config, "peers", "benchmark")
    model = open_family(described.family, described.config)
    job = Job(batch=case.shape.rows, sequence=case.shape.tokens, precision="float32")
    return model, make_plan(model, local_cluster(case.processes, FIXED_MACHINE), job, case.constraints())


class TokenRows:
    """Rows of random tokens, the same on every rank and on both sides."""

    def __init__(self, shape: Shape) -> None:
        draw = np.random.default_rng(0)
        self.rows = draw.integers(0, shape.vocabulary, (shape.rows, shape.tokens + 1))

    def row(self, index: int) -> np.ndarray:
        """Return one row: the tokens, and one more label."""
        return self.rows[index]


def first_values(shape: Shape) -> dict[str, Any]:
    """Return the initial value of every parameter by its global name, the same on every rank and on both sides."""
    import torch

    head = shape.hidden // shape.heads
    outputs = {
        "self_attn.q_proj": (shape.heads * head, shape.hidden), "self_attn.k_proj": (shape.groups * head, shape.hidden),
        "self_attn.v_proj": (shape.groups * head, shape.hidden), "self_attn.o_proj": (shape.hidden, shape.heads * head),
        "mlp.gate_proj": (shape.inner, shape.hidden), "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner), "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
    }  # fmt: skip
    shapes = {f"model.layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in outputs.items()}
    table = (shape.vocabulary, shape.hidden)
    shapes |= {"model.embed_tokens.weight": table, "model.norm.weight": (shape.hidden,), "lm_head.weight": table}
    draw = torch.Generator().manual_seed(0)
    return {
        name: 1.0 + 0.1 * torch.randn(size, generator=draw)
        if len(size) == 1
        else 0.05 * torch.randn(size, generator=draw)
        for name, size in sorted(shapes.items())
    }


def random_gradients(shape: Shape) -> dict[str, Any]:
    """Return a gradient for every parameter by its global name."""
    import torch

    draw = torch.Generator().manual_seed(1)
    return {name: 0.01 * torch.randn(value.shape, generator=draw) for name, value in first_values(shape).items()}


class PipefitSide:
    """The worker of this rank, with a batch that does not change.

    `step` runs one training step, or in a case of AdamW the update alone.
    """

    def __init__(self, case: Case, model: Any, plan: Any, comms: Any, values: dict[str, Any]) -> None:
        import torch

        from pipefit.data.stepplan import StepPlan, batch_shape
        from pipefit.run.inputs.feeds import make_inputs
        from pipefit.run.update.optimizer import OptimizerConfig
        from pipefit.run.worker.build import build_worker

        config = OptimizerConfig(
            lr=LR, weight_decay=WEIGHT_DECAY, decay="constant", max_norm=MAX_NORM,
            options={"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS},
        )  # fmt: skip

        def value_of(name: str, shape: Any, box: Any) -> torch.Tensor:
            return values[name][tuple(slice(start, stop) for start, stop in box)]

        device = torch.device("cpu")
        self.worker = build_worker(plan, model, comms, device, config, value=value_of)
        self.divisor, self.count = plan.job.batch * plan.job.sequence, 0
        step_plan = StepPlan(step=0, rows=np.arange(plan.job.batch), divisor=self.divisor, shape=batch_shape(plan))
        self.feeds = make_inputs(plan, self.worker.device, TokenRows(case.shape), step_plan, device)
        self.step: Callable[[], Any] = self._train
        if case.kind == "adamw":
            gradients = random_gradients(case.shape)
            for bucket in self.worker.buckets:
                for name, view in bucket.views.items():
                    view.copy_(gradients[name])
            self.step = self._update

    def _train(self) -> Any:
        result = self.worker.run_step(self.feeds, self.count, self.divisor)
        self.count += 1
        return result.loss

    def _update(self) -> Any:
        self.count += 1
        for bucket, optimizer in zip(self.worker.buckets, self.worker.optimizers, strict=True):
            optimizer.step(bucket.owned_gradients, LR, self.count)
        return 0.0

    def full_parameters(self) -> dict[str, Any]:
        """Return the complete parameters on rank 0, nothing elsewhere; all ranks call this together."""
        from pipefit.run.checkpoint.gather import gather_full
        from pipefit.run.worker.state import model_pieces

        pieces = gather_full(model_pieces(self.worker, saving=True))
        return {name.partition("/")[2]: tensor for name, tensor in pieces if tensor is not None}
