"""`pipefit train`: run a plan on this machine or as one rank of a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    plan: Annotated[Path, typer.Argument(help="The plan file.")],
    run_dir: Annotated[Path, typer.Option("-o", "--output", help="Folder for metrics, checkpoints and weights.")],
    steps: int = typer.Option(..., help="Optimizer steps of the whole run."),
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Files, folders, patterns or `stdlib` (the default), repeatable; for whole models FILE.py:FUNCTION; "
            "for multimodal models the folder of an index (pipefit data)."
        ),
    ] = None,
    tokenizer: str = typer.Option("bytes", help="`bytes`, or a local tokenizer.json."),
    field: str = typer.Option("text", help="Field of jsonl and column of parquet files that holds the text."),
    held_out: float = typer.Option(0.01, help="Rows kept for evaluation: a fraction below 1, or a number."),
    workers: int = typer.Option(0, help="Processes per rank that prepare images ahead; 0: the rank itself."),
    prepare: str = typer.Option("processes", help="Kind of --workers: processes of the host, or ray (actors)."),
    pack: bool = typer.Option(False, "--pack", help="Pack samples with images into a sequence."),
    on_long: str = typer.Option("fail", help="Samples longer than the sequence: fail or skip."),
    on_broken: str = typer.Option("fail", help="Images that broke after indexing: fail, or skip their samples."),
    cluster: str = typer.Option("", help="The cluster, if it is not found under its name in the plan."),
    local: int = typer.Option(0, help="Start this many ranks on this machine."),
    resume: str = typer.Option("", help="Continue from a run's folder or from one of its checkpoints."),
    weights: str = typer.Option(
        "", help="Start from Hugging Face safetensors in this folder, or in those of modules: vision=DIR,language=DIR."
    ),
    lr: float | None = typer.Option(None, help="Peak learning rate. Default: the optimizer's, for AdamW 3e-4."),
    weight_decay: float | None = typer.Option(
        None, help="Weight decay, not applied to norms and biases. Default: the optimizer's, for AdamW 0.1."
    ),
    optimizer_option: Annotated[
        list[str] | None,
        typer.Option(help="Another option of the plan's optimizer, such as beta1=0.9; repeatable."),
    ] = None,
    max_norm: float = typer.Option(1.0, help="Clip gradients to this global norm; 0 turns it off."),
    warmup: int = typer.Option(0, help="Steps of linear warm-up."),
    decay: str = typer.Option("cosine", help="After the warm-up: cosine, linear or constant."),
    min_lr_ratio: float = typer.Option(0.1, help="Learning rate at the last step, as a share of the peak."),
    eval_every: int = typer.Option(0, help="Steps between evaluations; 0: at the end only."),
    eval_batches: int = typer.Option(8, help="Batches of an evaluation, at most."),
    save_every: int = typer.Option(0, help="Steps between checkpoints; 0: at the end only."),
    keep: int = typer.Option(3, help="Checkpoints kept."),
    async_save: bool = typer.Option(False, "--async-save", help="Write checkpoints while the next steps run."),
    log_every: int = typer.Option(1, help="Steps between printed lines."),
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Write TensorBoard files as well."),
    trace: int = typer.Option(0, help="Write the times of this step's actions to trace.json."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    timeout: float = typer.Option(60.0, help="Seconds without a heartbeat after which a rank counts as dead."),
    print_launch: bool = typer.Option(False, "--print-launch", help="Print the torchrun and sbatch lines, and stop."),
    per_host: int = typer.Option(0, help="Ranks per host for --print-launch; 0: 8, or all where they are fewer."),
) -> None:
    """Train the plan's model on text, or a whole model on its data: metrics, checkpoints, weights as safetensors."""
    # Set before torch is imported: its C++ warnings about lost connections would hide our error message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pipefit.data.sources import STDLIB
    from pipefit.optimizers import find_optimizer
    from pipefit.plan.check.rules import load_plan
    from pipefit.run.config import TrainConfig, check_train_config
    from pipefit.run.session.launch import launch_lines, launch_run
    from pipefit.run.update.optimizer import OptimizerConfig, optimizer_options, parse_options

    optimizer = OptimizerConfig(
        lr=lr, weight_decay=weight_decay, options=parse_options(optimizer_option or ()), max_norm=max_norm,
        warmup=warmup, decay=decay, min_lr_ratio=min_lr_ratio, steps=steps,
    )  # fmt: skip
    config = check_train_config(
        TrainConfig(
            plan=str(plan), cluster=cluster, run_dir=str(run_dir), data=tuple(data or (STDLIB,)), tokenizer=tokenizer,
            field=field, held_out=held_out, workers=workers, prepare=prepare, pack=pack, on_long=on_long,  # type: ignore[arg-type]
            on_broken=on_broken, steps=steps,  # type: ignore[arg-type]
            optimizer=optimizer, resume=resume, weights=weights,
            eval_every=eval_every, eval_batches=eval_batches, save_every=save_every, keep=keep, async_save=async_save,
            log_every=log_every, tensorboard=tensorboard, trace=trace, device=device, timeout_s=timeout,
        )
    )  # fmt: skip
    loaded = load_plan(plan)
    optimizer_options(optimizer, find_optimizer(loaded.job.optimizer))
    arguments = [argument for argument in sys.argv[1:] if argument != "--print-launch"]
    if print_launch:
        ranks = len(loaded.used_devices)
        print(
            launch_lines(plan, loaded, without_options(arguments, "--per-host", "--local"), per_host or min(8, ranks))
        )
        return
    code = launch_run(loaded, config, local, arguments)
    if code:
        sys.exit(code)


def without_options(arguments: list[str], *options: str) -> list[str]:
    """Return the arguments without these options and their values."""
    remaining = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in options:
            skip = True
        elif argument.partition("=")[0] not in options:
            remaining.append(argument)
    return remaining
