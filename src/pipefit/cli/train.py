"""`pipefit train`: run a plan on this machine or as one rank of a cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from pipefit.cli._options import takes_options
from pipefit.run.config import TrainConfig, check_train_config


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `pipefit train` beside the configuration of the run."""

    local: int = 0
    "Start this many ranks on this machine."
    print_launch: bool = False
    "Print the torchrun and sbatch lines, and stop."
    optimizer_option: tuple[str, ...] = ()
    "Another option of the plan's optimizer, such as beta1=0.9; repeatable."
    nproc_per_node: int = 0
    "Ranks per host for --print-launch; 0: 8, or all where they are fewer."


@takes_options(
    TrainConfig,
    LaunchOptions,
    arguments=("plan",),
    flags={
        "run_dir": ("-o", "--output"),
        "worker_backend": ("--worker-backend", "--prepare"),
        "keep_checkpoints": ("--keep-checkpoints", "--keep"),
        "trace_step": ("--trace-step", "--trace"),
        "heartbeat_timeout_s": ("--heartbeat-timeout", "--timeout"),
        "nproc_per_node": ("--nproc-per-node", "--per-host"),
    },
    hidden=("options", "transfer_timeout_s"),
)
def command(config: TrainConfig, launch: LaunchOptions) -> None:
    """Train the plan's model on text, or a whole model on its data: metrics, checkpoints, weights as safetensors."""
    # Set before torch is imported: its C++ warnings about lost connections would hide our error message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pipefit.optimizers import find_optimizer
    from pipefit.plan.check.rules import load_plan
    from pipefit.run.session.launch import launch_lines, launch_run
    from pipefit.run.update.optimizer import optimizer_options, parse_options

    plan = Path(config.plan)
    optimizer = replace(config.optimizer, options=parse_options(launch.optimizer_option))
    config = replace(config, plan=str(plan), run_dir=str(Path(config.run_dir)), optimizer=optimizer)
    check_train_config(config)
    loaded = load_plan(plan)
    optimizer_options(optimizer, find_optimizer(loaded.job.optimizer))
    arguments = [argument for argument in sys.argv[1:] if argument != "--print-launch"]
    if launch.print_launch:
        per_host = launch.nproc_per_node or min(8, len(loaded.used_devices))
        remaining = without_options(arguments, "--nproc-per-node", "--per-host", "--local")
        print(launch_lines(plan, loaded, remaining, per_host))
        return
    code = launch_run(loaded, config, launch.local, arguments)
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
