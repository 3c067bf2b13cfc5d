"""Start of a run: as a rank under torchrun, as a single process, or as the parent of `--local N` ranks on this machine.

On any failure the user reads one message and the exit code is 2. The failing rank prints it
(`faults.HeartbeatMonitor`); the parent prints one only if a rank died silently.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from pipefit import __version__, codec
from pipefit.data.multimodal.images import decoder_versions
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES
from pipefit.errors import ClusterError, PipefitError, RunError
from pipefit.optimizers import find_optimizer
from pipefit.plan.types import Plan
from pipefit.run.config import TrainConfig
from pipefit.run.session.faults import (
    EXIT_CODE,
    exited_rank,
    injected_fault,
    is_connection_lost,
    is_out_of_memory,
    out_of_memory,
    say_once,
    unexpected_error,
    verify_ranks,
)
from pipefit.run.session.rendezvous import World, choose_device, run_id, under_torchrun
from pipefit.run.update.optimizer import optimizer_options
from pipefit.run.worker.worker import device_lane

START_TIMEOUT_S = 300.0
"""Time that ranks wait for each other at the start."""

SAY_TIMEOUT_S = 3.0
"""Time that a rank which fails before the heartbeat starts waits for the first failing rank's message."""


def launch_run(plan: Plan, config: TrainConfig, local: int, arguments: Sequence[str]) -> int:
    """Run `plan` as the environment requires and return the exit code. `arguments` are those of the command line."""
    devices = len(plan.used_devices)
    if under_torchrun():
        return run_rank(plan, config)
    if local and local != devices:
        raise RunError(
            "The plan is for another number of processes.",
            where="--local",
            seen=local,
            allowed=f"{devices}, the devices of the plan",
        )
    if devices == 1:
        return run_rank(plan, config)
    if local or is_local_plan(plan):
        return run_local(devices, arguments)
    raise RunError(
        f"The plan is for {devices} devices: it needs {devices} processes.",
        where="pipefit train",
        seen="one process, not started by torchrun",
        next_step=f"add --local {devices} to start them on this machine, or see --print-launch for a cluster",
    )


def is_local_plan(plan: Plan) -> bool:
    """Return True if the plan was made with `pipefit plan --local N` on this machine."""
    from pipefit.cluster import detect_machine, local_cluster
    from pipefit.codec import content_digest

    machine = detect_machine()
    for count in range(len(plan.used_devices), 65):
        try:
            cluster = local_cluster(count, machine)
        except ClusterError:  # more processes than this machine holds
            return False
        if content_digest(cluster) == plan.hashes.cluster:
            return True
    return False


def run_rank(plan: Plan, config: TrainConfig) -> int:
    """Run one rank and report its errors; return the exit code."""
    world = World(choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0"))))
    try:
        if world.size != len(plan.used_devices):
            raise RunError(
                "The plan is for another number of ranks.",
                where="WORLD_SIZE",
                seen=world.size,
                allowed=f"{len(plan.used_devices)}, the devices of the plan",
            )
        world.open_store()
        if world.store is not None:
            verify_ranks(world.store, world.rank, world.size, rank_token(plan, config, world.rank), START_TIMEOUT_S)
        world.start_group(config.heartbeat_timeout_s, config.transfer_timeout_s)
        from pipefit.run.session.train import train_rank

        train_rank(plan, config, world)
    except Exception as error:
        return _report_failure(error, plan, config, world)
    world.stop_group()
    return 0


def run_local(count: int, arguments: Sequence[str]) -> int:
    """Start `count` ranks of this command on this machine through torch's own launcher."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=run_id(),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch_config, sys.executable)("-m", "pipefit", *arguments)
    except ChildFailedError as failed:
        return _judge_failures(failed.failures)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def launch_lines(plan_file: Path, plan: Plan, arguments: Sequence[str], per_host: int) -> str:
    """Return the torchrun line for each host and the sbatch script that start this run on a real cluster."""
    devices = len(plan.used_devices)
    if per_host < 1 or devices % per_host:
        raise RunError(
            "The plan's devices cannot be spread evenly over hosts.",
            where="--nproc-per-node",
            seen=per_host,
            allowed=f"a divisor of {devices}",
        )
    hosts = devices // per_host
    command = shlex.join(["-m", "pipefit", *arguments])
    torchrun = (
        f"torchrun --nnodes={hosts} --nproc-per-node={per_host} --rdzv-backend=c10d "
        f"--rdzv-endpoint=$HEAD:29500 --rdzv-id={plan.content_hash} {command}"
    )
    return f"""# {plan_file}: {devices} ranks, {per_host} on each of {hosts} host{"s" if hosts > 1 else ""}
# On every host, with HEAD the name of the first one:
{torchrun}

# Or with Slurm, as a file for sbatch:
#!/bin/bash
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_host}
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {torchrun}
"""


_LOCAL = ("plan", "cluster", "run_dir", "data", "tokenizer", "chat_template", "resume", "weights", "adapter")
"""Options that are paths on a host: their contents are compared, not their names."""


def rank_token(plan: Plan, config: TrainConfig, rank: int) -> str:
    """Return the text on which all ranks must agree: plan, package versions, and every option that is not a path on a
    host; for a plan with images also the decoder versions."""
    fault = injected_fault()
    odd = "-other" if fault is not None and fault.kind == "plan" and fault.rank == rank else ""
    options = {key: value for key, value in codec.to_data(config).items() if key not in _LOCAL}
    options |= options.pop("optimizer")
    del options["options"]
    options |= codec.to_data(optimizer_options(config.optimizer, find_optimizer(plan.job.optimizer)))
    options |= {"steps": config.steps, "resumes": bool(config.resume), "with weights": bool(config.weights)}
    options |= {"with an adapter": bool(config.adapter)}
    words = [f"{key.replace('_', ' ')} {value}" for key, value in sorted(options.items())]
    software = [f"pipefit {__version__}", f"torch {torch.__version__}"]
    if any(stage.space in (PATCHES, LATENTS) for stage in plan.stages):
        software.append(decoder_versions())
    return ", ".join([f"plan {plan.content_hash}{odd}", *software, *words])


def _report_failure(error: Exception, plan: Plan, config: TrainConfig, world: World) -> int:
    """Report the error once over all ranks; return the exit code."""
    if is_out_of_memory(error):
        device = plan.used_devices[world.rank]
        step = int(getattr(error, "step", 0))
        error = out_of_memory(plan, device, device_lane(plan, device), step, error)
    elif is_connection_lost(error) and world.monitor is not None:
        # A rank is gone: wait until the rank that watches it reports which.
        error = world.monitor.await_fault(config.heartbeat_timeout_s + 5) or error
    if isinstance(error, PipefitError):
        if world.monitor is not None:
            world.monitor.announce_fault(error)
            world.monitor.wait_for_others()
            world.monitor.stop()
        elif world.store is not None:
            say_once(world.store, error, SAY_TIMEOUT_S)
        else:
            print(f"pipefit: {error.full_text()}", file=sys.stderr, flush=True)
        return EXIT_CODE
    traceback.print_exception(error)
    if world.monitor is not None:
        world.monitor.announce_fault(unexpected_error(world.rank, error))
        world.monitor.wait_for_others()
        world.monitor.stop()
    return 1


def _judge_failures(failures: object) -> int:
    """Return the exit code of a failed local run. Raises RunError naming a rank that died silently."""
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}  # type: ignore[attr-defined]
    if any(code == EXIT_CODE for code in codes.values()):
        return EXIT_CODE
    # A rank that ended with 1 has printed its traceback. torch's launcher ends the remaining ranks with SIGTERM: a rank
    # that ended otherwise failed first.
    silent = [(rank, code) for rank, code in codes.items() if code not in (1, -signal.SIGTERM)]
    if not silent and 1 in codes.values():
        return 1
    raise exited_rank(*next(iter(silent or codes.items())))
