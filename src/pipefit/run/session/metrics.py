"""Metrics of a run: one line per step in torchtitan's terms, JSON lines, and TensorBoard.

Tokens per second and TFLOP/s are per device, as torchtitan prints them; the JSON lines also hold the totals. MFU is
model FLOPs (no recomputation) over peak FLOP/s; the peak and its source are printed once.
"""

from __future__ import annotations

import contextlib
import json
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
    """The peak FLOP/s that MFU refers to."""

    flops_per_s: float
    "Peak of one device in the run's precision; 0 if unknown."
    source: str
    "Source of the peak in words: a data sheet, or an assumption."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step."""

    step: int
    "Counted from 1, as it is printed."
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    "Mean over the steps since the last record, measured after reading their results; without evaluations and saves."
    tokens: int
    "Tokens of the whole step."
    memory_bytes: int
    "Peak of rank 0: allocated on CUDA, resident without Python and its libraries on the CPU."
    memory_share: float
    "Fraction of the device's memory."
    tps: float
    "Tokens per second and device."
    tflops: float
    "Model TFLOP/s per device."
    mfu: float
    "Fraction of the peak, 0 to 1; 0 if the peak is unknown."
    data_s: float = 0.0
    "Part of `step_s` in which rank 0 waited for its data or made them."
    loss_scale: float = 0.0
    "Scale of the loss under float16; 0 without one."
    skipped_steps: int = 0
    "Steps of the run so far that changed nothing, because their gradients were not finite."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of every step of a run, to which its time is compared."""

    tokens: int
    "Tokens of the whole step."
    flops: float
    "Model FLOPs of the step."
    devices: int
    peak: PeakFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The results and measurements of one step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    memory: tuple[int, int]
    "(used, total) bytes."
    data_s: float = 0.0
    loss_scale: float = 0.0
    skipped_steps: int = 0


def step_metrics(measured: MeasuredStep, work: StepWork) -> StepMetrics:
    """Return the metrics of one step."""
    rate = work.flops / measured.step_s / work.devices
    used_bytes, total_bytes = measured.memory
    peak_flops_per_s = work.peak.flops_per_s
    return StepMetrics(
        step=measured.step,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        lr=measured.lr,
        step_s=measured.step_s,
        tokens=work.tokens,
        memory_bytes=used_bytes,
        memory_share=used_bytes / total_bytes if total_bytes else 0.0,
        tps=work.tokens / measured.step_s / work.devices,
        tflops=rate / 1e12,
        mfu=rate / peak_flops_per_s if peak_flops_per_s else 0.0,
        data_s=measured.data_s,
        loss_scale=measured.loss_scale,
        skipped_steps=measured.skipped_steps,
    )


def format_step(metrics: StepMetrics) -> str:
    """`step: 10  loss: 2.1  grad_norm: 0.9  memory: 1.2GiB(5.1%)  tps: 1,234  tflops: 0.51  mfu: 3.20%`."""
    mfu = f"{metrics.mfu:.2%}" if metrics.mfu else "n/a"
    scale = f"  loss_scale: {metrics.loss_scale:g}" if metrics.loss_scale else ""
    skipped = f"  skipped: {metrics.skipped_steps}" if metrics.skipped_steps else ""
    return (
        f"step: {metrics.step:>4}  loss: {metrics.loss:8.4f}  grad_norm: {metrics.grad_norm:8.4f}  "
        f"memory: {metrics.memory_bytes / GIB:5.2f}GiB({metrics.memory_share:.1%})  "
        f"tps: {round(metrics.tps):,}  tflops: {metrics.tflops:.3g}  mfu: {mfu}{scale}{skipped}"
    )


def find_peak(device: torch.device, precision: str, sharing: int = 1) -> PeakFlops:
    """Return the data-sheet peak of this device, or of this machine's cores as `cluster.local` estimates it."""
    from pipefit.cluster import local_cluster
    from pipefit.cluster.catalogue import reported_device
    from pipefit.cluster.kinds import data_sheet_kind

    if device.type != "cuda":
        kind = local_cluster(sharing).kinds["cpu"]
        return PeakFlops(
            flops_per_s=kind.peak_flops_per_s.get(precision, 0.0),
            source=f"{kind.provenance.source}: {kind.provenance.where}",
        )
    name = torch.cuda.get_device_name(device)
    known = reported_device(name)
    if known is None:
        return PeakFlops(flops_per_s=0.0, source=f"no data sheet known for {name}")
    kind = data_sheet_kind(known)[0]
    return PeakFlops(flops_per_s=kind.peak_flops_per_s.get(precision, 0.0), source=kind.provenance.where)


class RunLog:
    """Log of a run's metrics: `metrics.jsonl` in the run directory, TensorBoard if asked, lines on stdout.

    Made on rank 0 only. A resumed run appends. Raises RunError if the file cannot be written.
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
        """Print a line that is not a metric."""
        print(text, file=self._out, flush=True)

    def log_step(self, metrics: StepMetrics) -> None:
        """Log one training step."""
        self._write_record(asdict(metrics))
        self.write_line(format_step(metrics))
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr", "tps", "tflops", "mfu", "memory_bytes"):
                self._board.add_scalar(name, getattr(metrics, name), metrics.step)

    def log_evaluation(self, step: int, loss: float, seconds: float) -> None:
        """Log the mean loss over the held-out text."""
        self._write_record({"step": step, "eval_loss": loss, "eval_s": seconds})
        self.write_line(f"step: {step:>4}  eval_loss: {loss:8.4f}")
        if self._board is not None:
            self._board.add_scalar("eval_loss", loss, step)

    def log_broken(self, step: int, images: Mapping[str, str], samples: int) -> None:
        """Log broken image files of all ranks with the reason; `samples` have been skipped so far in total."""
        self._write_record({"step": step, "broken_images": dict(images), "samples_left_out": samples})
        first = next(iter(images))
        self.write_line(
            f"step: {step:>4}  broken images: {len(images)}, among them {first}: {images[first]}; "
            f"samples left out so far: {samples}"
        )

    def log_pace(self, valid: bool, words: str) -> None:
        """Log the pace of a lab run and write it to `lab.json`; `valid`: the emulated devices were kept up with."""
        path = self._path.with_name("lab.json")
        with write_errors("verdict of the lab", path):
            path.write_text(json.dumps({"valid": valid, "pace": words}) + "\n", encoding="utf-8")
        self.write_line(f"lab: {'valid' if valid else 'INVALID'}: {words}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the failed flush has been reported
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _write_record(self, record: dict[str, Any]) -> None:
        with write_errors("metrics file", self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def open_board(directory: Path) -> Any:
    """Return a TensorBoard writer. Raises RunError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        from pipefit.errors import RunError
        from pipefit.extras import install_command

        raise RunError(
            "TensorBoard is not installed.", where="--tensorboard", next_step=install_command("tensorboard")
        ) from None
    return SummaryWriter(str(directory))
