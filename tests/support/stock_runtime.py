"""What every process of the stock-runtime test does: run a CSV on torch.distributed.pipelining, return gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, ROWS = 16, 8, 24


class Layer(nn.Module):
    """A residual layer with two weights, so that I and W differ."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.back = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.into(x)))


def model() -> list[Layer]:
    """The same layers on every process."""
    torch.manual_seed(11)
    return [Layer() for _ in range(LAYERS)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum, so that microbatches add up to the batch."""
    return ((output - target) ** 2).sum()


def gradients(layers: dict[int, Layer]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter.grad
        for index, layer in layers.items()
        for name, parameter in layer.named_parameters()
    }


def in_one_process() -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by plain autograd."""
    layers, (x, y) = model(), batch()
    for layer in layers:
        x = layer(x)
    value = loss(x, y)
    value.backward()
    return float(value.detach()), gradients(dict(enumerate(layers)))


def run_csv(text: str, placement: tuple[int, ...], microbatches: int) -> tuple[float | None, dict[str, torch.Tensor]]:
    """(summed loss where the last stage is, gradients of this process's layers) after one step of stock PyTorch."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, stages = dist.get_rank(), len(placement)
    per_stage = LAYERS // stages
    layers, (x, y) = model(), batch()
    mine = [stage for stage, lane in enumerate(placement) if lane == rank]
    held = {s * per_stage + k: layers[s * per_stage + k] for s in mine for k in range(per_stage)}
    pieces = [
        PipelineStage(nn.Sequential(*layers[s * per_stage : (s + 1) * per_stage]), s, stages, torch.device("cpu"))
        for s in mine
    ]
    runtime = _PipelineScheduleRuntime(pieces, microbatches, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        runtime._load_csv(str(path), format="compute_only")
    losses: list[torch.Tensor] = []
    first, last = 0 in mine, stages - 1 in mine
    runtime.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
    return (float(sum(losses)) if last else None), gradients(held)
