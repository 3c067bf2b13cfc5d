"""What a run reports: one line a step in the words that torchtitan's users know, JSON lines, and TensorBoard.

Tokens per second and TFLOP/s are per device, as torchtitan prints them; the JSON lines hold the totals too. MFU is
model FLOPs (no recomputation) over peak FLOP/s; the peak that is used is printed once, with where it comes from.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from pipefit.run.session.write_errors import write_errors

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFlops:
    """The peak that MFU is measured against."""

    flops_per_s: float
    "Of one device in the run's precision; 0 where it is not known."
    source: str
    "In words: which data sheet, or what was assumed."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step of a run."""

    step: int
    "Counted from 1, as it is printed."
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    "Mean of the steps since the last record, taken after their results were read: evaluations and saves not counted."
    tokens: int
    "Of the whole step."
    memory_bytes: int
    "Peak of rank 0: allocated on CUDA, resident on CPU."
    memory_share: float
    "Of the device's memory."
    tps: float
    "Tokens per second and device."
    tflops: float
    "Model TFLOP/s per device."
    mfu: float
    "Share of the peak, 0 to 1; 0 where the peak is not known."
    data_s: float = 0.0
    "Of `step_s`: what rank 0 waited for its data, or took to make them."


def step_metrics(
    *,
    step: int,
    loss: float,
    grad_norm: float,
    lr: float,
    step_s: float,
    tokens: int,
    flops: float,
    devices: int,
    peak: PeakFlops,
    memory: tuple[int, int],
    data_s: float = 0.0,
) -> StepMetrics:
    """The figures of one step. `flops` are the model FLOPs of the step, `memory` (used, whole) bytes."""
    rate = flops / step_s / devices
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        step_s=step_s,
        tokens=tokens,
        memory_bytes=memory[0],
        memory_share=memory[0] / memory[1] if memory[1] else 0.0,
        tps=tokens / step_s / devices,
        tflops=rate / 1e12,
        mfu=rate / peak.flops_per_s if peak.flops_per_s else 0.0,
        data_s=data_s,
    )


def format_step(metrics: StepMetrics) -> str:
    """`step: 10  loss: 2.1  grad_norm: 0.9  memory: 1.2GiB(5.1%)  tps: 1,234  tflops: 0.51  mfu: 3.20%`."""
    mfu = f"{metrics.mfu:.2%}" if metrics.mfu else "n/a"
    return (
        f"step: {metrics.step:>4}  loss: {metrics.loss:8.4f}  grad_norm: {metrics.grad_norm:8.4f}  "
        f"memory: {metrics.memory_bytes / GIB:5.2f}GiB({metrics.memory_share:.1%})  "
        f"tps: {round(metrics.tps):,}  tflops: {metrics.tflops:.3g}  mfu: {mfu}"
    )


def device_memory(device: torch.device, sharing: int = 1) -> tuple[int, int]:
    """(peak bytes used by this process, bytes of the device); `sharing` CPU processes share the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), _machine_bytes(sharing)


def find_peak(device: torch.device, precision: str, sharing: int = 1) -> PeakFlops:
    """The data-sheet peak of this device, or of this machine's cores as `cluster.local` guesses it."""
    from pipefit.cluster import local_cluster
    from pipefit.cluster.kinds import SHEETS, data_sheet_kind

    if device.type != "cuda":
        kind = local_cluster(sharing).kinds["cpu"]
        return PeakFlops(
            flops_per_s=kind.peak_flops_per_s.get(precision, 0.0),
            source=f"{kind.provenance.source}: {kind.provenance.where}",
        )
    name = torch.cuda.get_device_name(device)
    words = name.replace(" ", "-").lower()
    for key in sorted(SHEETS, key=len, reverse=True):
        if key.lower() in words:
            kind = data_sheet_kind(key)[0]
            return PeakFlops(flops_per_s=kind.peak_flops_per_s[precision], source=kind.provenance.where)
    return PeakFlops(flops_per_s=0.0, source=f"no data sheet known for {name}")


class RunLog:
    """Where a run's figures go: `metrics.jsonl` in the run directory, TensorBoard if asked, lines on stdout.

    Made on rank 0 only. A resumed run appends. RunError where the file cannot be written.
    """

    def __init__(self, run_dir: Path, tensorboard: bool = False, out: IO[str] | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._path = run_dir / "metrics.jsonl"
        with write_errors("metrics file", self._path):
            self._file = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            self._board = open_board(run_dir / "tensorboard")

    def write_line(self, text: str) -> None:
        """A line that is not a metric."""
        print(text, file=self._out, flush=True)

    def log_step(self, metrics: StepMetrics) -> None:
        """One training step."""
        self._write_record(asdict(metrics))
        self.write_line(format_step(metrics))
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr", "tps", "tflops", "mfu", "memory_bytes"):
                self._board.add_scalar(name, getattr(metrics, name), metrics.step)

    def log_evaluation(self, step: int, loss: float, seconds: float) -> None:
        """The mean loss over the held-out text."""
        self._write_record({"step": step, "eval_loss": loss, "eval_s": seconds})
        self.write_line(f"step: {step:>4}  eval_loss: {loss:8.4f}")
        if self._board is not None:
            self._board.add_scalar("eval_loss", loss, step)

    def log_broken(self, step: int, images: Mapping[str, str], samples: int) -> None:
        """Image files that were found broken, on any rank, and why; `samples` were left out so far in all."""
        self._write_record({"step": step, "broken_images": dict(images), "samples_left_out": samples})
        first = next(iter(images))
        self.write_line(
            f"step: {step:>4}  broken images: {len(images)}, among them {first}: {images[first]}; "
            f"samples left out so far: {samples}"
        )

    def log_pace(self, valid: bool, words: str) -> None:
        """Of a run in a lab: whether the emulated devices could be kept up with, into `lab.json`."""
        path = self._path.with_name("lab.json")
        with write_errors("verdict of the lab", path):
            path.write_text(json.dumps({"valid": valid, "pace": words}) + "\n", encoding="utf-8")
        self.write_line(f"lab: {'valid' if valid else 'INVALID'}: {words}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be flushed has been told
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _write_record(self, record: dict[str, Any]) -> None:
        with write_errors("metrics file", self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def open_board(directory: Path) -> Any:
    """A TensorBoard writer. Raises RunError where the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        from pipefit.errors import RunError

        raise RunError(
            "TensorBoard is not installed.", where="--tensorboard", next_step="pip install 'pipefit[tensorboard]'"
        ) from None
    return SummaryWriter(str(directory))


def _machine_bytes(sharing: int) -> int:
    from pipefit.cluster import local_cluster

    return local_cluster(sharing).kinds["cpu"].memory_bytes
