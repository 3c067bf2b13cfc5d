"""Going on from a checkpoint: the state of the worker, and the checks that it is of the same run."""

from __future__ import annotations

from pathlib import Path

from pipefit import codec
from pipefit.errors import CheckpointError, RunError
from pipefit.model.adapters.options import is_tuned
from pipefit.plan.types import Plan
from pipefit.run.checkpoint import checkpoint
from pipefit.run.config import TrainConfig
from pipefit.run.inputs.feeding import BatchSource
from pipefit.run.inputs.image_feeding import ImageBatchSource
from pipefit.run.session.faults import name_ranks
from pipefit.run.session.rendezvous import World
from pipefit.run.worker.state import stored_pieces
from pipefit.run.worker.worker import Worker


def resume_run(worker: Worker, plan: Plan, config: TrainConfig, feeding: BatchSource, world: World) -> int:
    """Load a checkpoint into the worker; return the next step. Raises CheckpointError if it is from another run."""
    folder = checkpoint.locate_checkpoint(Path(config.resume))
    manifest = checkpoint.read_manifest(folder)
    extra = manifest.extra
    world.require_agreement("checkpoint", codec.content_digest(manifest), checkpoint_mismatch)
    expected = {
        "model": (plan.hashes.model, "the model"),
        "seed": (plan.job.seed, "the seed"),
        "batch": (plan.job.batch, "the batch"),
        "sequence": (plan.job.sequence, "the sequence length"),
        "corpus": (feeding.digest, "the data"),
        "held_out": (feeding.rows.held_out, "the number of rows held out (--held-out)"),
    }
    for key, (value, words) in expected.items():
        if value != "" and extra.get(key, value if key == "held_out" else None) != value:
            weights = "DIR" if is_tuned(plan.model.config) else f"{folder.parent.parent}/weights"
            raise CheckpointError(
                f"The checkpoint is of another run: {words} differs, so the run could not continue as it was.",
                where=str(folder),
                seen=f"{extra.get(key)} in the checkpoint, {value} now",
                next_step=f"use the values of the checkpoint, or start a new run with --weights {weights}",
            )
    checkpoint.load_checkpoint(folder, stored_pieces(worker, manifest.tensors), group=world.cpu_group)
    worker.skipped_steps = int(extra.get("skipped_steps", 0))
    if worker.loss_scale is not None and "loss_scale" in extra:
        worker.loss_scale.restore(extra["loss_scale"])
    if isinstance(feeding, ImageBatchSource):
        feeding.exclude_samples(extra.get("left_out", ()))
    if int(extra["step"]) >= config.steps:
        raise RunError(
            "The checkpoint is already at the last step.",
            where="--steps",
            seen=f"{config.steps}, checkpoint at {extra['step']}",
            next_step="give more steps",
        )
    return int(extra["step"])


def checkpoint_mismatch(ranks: list[int], seen: str) -> RunError:
    """Return the error for ranks that would resume from another checkpoint than rank 0's."""
    return RunError(
        f"These ranks found another checkpoint than rank 0: {name_ranks(ranks)}.",
        where="--resume",
        seen=f"checkpoint {seen}",
        next_step="name a checkpoint in a folder that all hosts share",
    )
