"""The resolved configuration of a training run, kept as `config.json` in the run's folder.

Its fields are options of `pipefit train`, and the strings below them their help; so this module needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from pipefit.data.sources import STDLIB
from pipefit.errors import RunError
from pipefit.run.update.optimizer import OptimizerConfig, check_config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All options of a run."""

    plan: str
    "The plan file."
    cluster: str = ""
    "The cluster, if it is not found under its name in the plan."
    run_dir: str
    "Folder for metrics, checkpoints and weights."
    data: tuple[str, ...] = (STDLIB,)
    """Files, folders, patterns or `stdlib` (the default), repeatable; for whole models FILE.py:FUNCTION; for multimodal
    models the folder of an index (pipefit data)."""
    tokenizer: str = "bytes"
    "`bytes`, or a local tokenizer.json or its folder."
    field: str = "text"
    "Field of jsonl and column of parquet files that holds the text, or the messages of chat data."
    chat_template: str = ""
    "Chat data: a Jinja file with the chat template. Default: the tokenizer's."
    loss_on: Literal["answers", "all"] = "answers"
    "Chat data: the labels are the tokens of the assistant's answers, or all tokens."
    held_out: float = 0.01
    "Rows kept for evaluation: a fraction below 1, or a number."
    workers: int = 0
    "Processes per rank that prepare images ahead; 0: the rank itself."
    worker_backend: Literal["processes", "ray"] = "processes"
    "Kind of --workers: processes of the host, or ray (actors)."
    pack: bool = False
    "Pack samples with images into a sequence."
    on_long: Literal["fail", "skip"] = "fail"
    "Samples longer than the sequence: fail or skip."
    on_broken: Literal["fail", "skip"] = "fail"
    "Images that broke after indexing: fail, or skip their samples."
    steps: int
    "Optimizer steps of the whole run."
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    resume: str = ""
    "Continue from a run's folder or from one of its checkpoints."
    weights: str = ""
    """Start from Hugging Face safetensors in this folder, or in those of modules: vision=DIR,language=DIR; `model`: in
    the plan's model directory."""
    adapter: str = ""
    "With adapters: start from those in this folder, in the format of PEFT; needs --weights."
    merge: bool = False
    "With adapters: also write the complete model with the adapters added to its weights."
    eval_every: int = 0
    "Steps between evaluations; 0: at the end only."
    eval_batches: int = 8
    "Batches of an evaluation, at most."
    save_every: int = 0
    "Steps between checkpoints; 0: at the end only."
    keep_checkpoints: int = 3
    "Checkpoints kept."
    async_save: bool = False
    "Write checkpoints while the next steps run."
    log_every: int = 1
    "Steps between printed lines."
    tensorboard: bool = False
    "Write TensorBoard files as well."
    trace_step: int = 0
    "Write the times of this step's actions to trace.json."
    nonfinite: Literal["stop", "skip"] = "stop"
    """Gradients that are not finite: stop the run, or skip the step, for which the host waits for the norm of every
    step. float16 always skips, and halves the scale of the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "auto, cpu or cuda."
    heartbeat_timeout_s: float = 60.0
    "Seconds without a heartbeat after which a rank counts as dead."
    transfer_timeout_s: float = 1800.0
    "A transfer or collective that takes longer fails."


def check_train_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration unchanged. Raises RunError naming the first invalid option."""
    check_config(config.optimizer)
    limits = {
        "held_out": (
            math.isfinite(config.held_out) and config.held_out >= 0,
            "a fraction from 0 up to 1, or a whole number of rows",
        ),
        "workers": (config.workers >= 0, "0 or more"),
        "worker_backend": (config.worker_backend in ("processes", "ray"), "processes or ray"),
        "loss_on": (config.loss_on in ("answers", "all"), "answers or all"),
        "on_long": (config.on_long in ("fail", "skip"), "fail or skip"),
        "on_broken": (config.on_broken in ("fail", "skip"), "fail or skip"),
        "steps": (config.steps >= 1, "1 or more"),
        "eval_every": (config.eval_every >= 0, "0 or more"),
        "eval_batches": (config.eval_batches >= 1, "1 or more"),
        "save_every": (config.save_every >= 0, "0 or more"),
        "keep_checkpoints": (config.keep_checkpoints >= 1, "1 or more"),
        "log_every": (config.log_every >= 1, "1 or more"),
        "heartbeat_timeout_s": (0 < config.heartbeat_timeout_s < math.inf, "above 0, in seconds"),
        "nonfinite": (config.nonfinite in ("stop", "skip"), "stop or skip"),
        "device": (config.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
    }
    for name, (good, allowed) in limits.items():
        if not good:
            option = "--" + name.removesuffix("_s").replace("_", "-")
            raise RunError("The run cannot start with this.", where=option, seen=getattr(config, name), allowed=allowed)
    if config.resume and config.weights:
        raise RunError("A run starts from a checkpoint or from weights, not from both.", where="--resume and --weights")
    return config
