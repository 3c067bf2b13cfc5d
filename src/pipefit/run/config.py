"""The resolved configuration of a training run, kept as `config.json` in the run's folder."""

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
    """All options of `pipefit train` other than the plan itself."""

    plan: str
    "The plan file."
    cluster: str = ""
    "The cluster, if it is not found under the plan's name for it."
    run_dir: str
    "Folder for metrics, checkpoints and final weights."
    data: tuple[str, ...] = (STDLIB,)
    "Files, folders, patterns, or `stdlib`; for a captured module a data set as FILE.py:FUNCTION."
    tokenizer: str = "bytes"
    "`bytes`, or a local tokenizer.json."
    field: str = "text"
    "The field of jsonl and the column of parquet files that holds the text."
    held_out: float = 0.01
    "Rows kept for evaluation: a fraction below 1, or a number of rows."
    workers: int = 0
    "Processes of every rank that prepare images ahead; 0: the rank itself, at the start of a step. Multimodal models."
    prepare: Literal["processes", "ray"] = "processes"
    "Kind of the workers: processes of the rank's host, or actors of a Ray cluster. Multimodal models."
    pack: bool = False
    "Put as many samples into a sequence as fit. Multimodal models."
    on_long: Literal["fail", "skip"] = "fail"
    "Treatment of a sample longer than the sequence: end the run, or skip the sample. Multimodal models."
    on_broken: Literal["fail", "skip"] = "fail"
    "Treatment of an image that broke after indexing: end the run, or skip its sample. Multimodal models."
    steps: int
    "Optimizer steps of the whole run, including those before a resume."
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    resume: str = ""
    "A run's folder or one of its checkpoints."
    weights: str = ""
    "A directory with Hugging Face safetensors to start from, instead of random values."
    eval_every: int = 0
    "Steps between evaluations on the held-out rows; 0: only at the end."
    eval_batches: int = 8
    "Batches of an evaluation, at most."
    save_every: int = 0
    "Steps between checkpoints; 0: only at the end."
    keep: int = 3
    "Checkpoints kept."
    async_save: bool = False
    "Checkpoints are copied to CPU memory and written while the next steps run."
    log_every: int = 1
    "Steps between printed lines; reading the loss waits for the device."
    tensorboard: bool = False
    trace: int = 0
    "Write the actions' times of this step (from 1) to trace.json; 0: none."
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = 60.0
    "A rank without a heartbeat for this long counts as dead."
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
        "prepare": (config.prepare in ("processes", "ray"), "processes or ray"),
        "on_long": (config.on_long in ("fail", "skip"), "fail or skip"),
        "on_broken": (config.on_broken in ("fail", "skip"), "fail or skip"),
        "steps": (config.steps >= 1, "1 or more"),
        "eval_every": (config.eval_every >= 0, "0 or more"),
        "eval_batches": (config.eval_batches >= 1, "1 or more"),
        "save_every": (config.save_every >= 0, "0 or more"),
        "keep": (config.keep >= 1, "1 or more"),
        "log_every": (config.log_every >= 1, "1 or more"),
        "timeout_s": (0 < config.timeout_s < math.inf, "above 0, in seconds"),
        "device": (config.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
    }
    for name, (good, allowed) in limits.items():
        if not good:
            option = "--" + name.removesuffix("_s").replace("_", "-")
            raise RunError("The run cannot start with this.", where=option, seen=getattr(config, name), allowed=allowed)
    if config.resume and config.weights:
        raise RunError("A run starts from a checkpoint or from weights, not from both.", where="--resume and --weights")
    return config
