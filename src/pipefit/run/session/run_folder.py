"""The folder of a run: checks of its owner before anything is written, and the files written at the start."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from pipefit import __version__, codec
from pipefit.errors import RunError
from pipefit.plan.types import Plan
from pipefit.run.checkpoint.checkpoint import locate_checkpoint
from pipefit.run.config import TrainConfig
from pipefit.run.session.staleness import check_cluster


def check_run_dir(config: TrainConfig) -> None:
    """Raise RunError if the folder holds another run, or files that belong to no run. Writes nothing.

    A folder holds a run if it has metrics or a checkpoint: a start that failed before its first step does not count. A
    resume may continue in the folder of its own run.
    """
    directory = Path(config.run_dir)
    if directory.exists() and not directory.is_dir():
        raise RunError("The run's folder is a file.", where="-o", seen=str(directory), next_step="give a folder")
    if not holds_run(directory):
        _check_empty(directory, config)
    elif not config.resume:
        raise RunError(
            "The folder holds another run.",
            where=str(directory),
            seen="checkpoints" if _has_checkpoints(directory) else "metrics.jsonl, and no checkpoint to continue from",
            next_step=_resume_advice(directory),
        )
    elif directory.resolve() not in locate_checkpoint(Path(config.resume)).resolve().parents:
        raise RunError(
            "The folder holds another run than the one to continue.",
            where=str(directory),
            seen=f"--resume {config.resume}",
            next_step=_resume_advice(directory),
        )


def holds_run(directory: Path) -> bool:
    """Return True if a run left metrics or checkpoints here."""
    metrics = directory / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or _has_checkpoints(directory)


def _has_checkpoints(directory: Path) -> bool:
    return any((directory / "checkpoints").glob("step-*"))


def _resume_advice(directory: Path) -> str:
    if _has_checkpoints(directory):
        return f"continue it with --resume {directory}, or give another folder with -o"
    return "give another folder with -o, or delete this one"


def _check_empty(directory: Path, config: TrainConfig) -> None:
    """Raise RunError if the folder holds foreign files; files left by a failed start of pipefit may be overwritten."""
    if not directory.is_dir() or _is_ours(directory / "config.json"):
        return
    input_files = {Path(name).resolve() for name in (config.plan, config.cluster) if name}
    strange = sorted(
        path.name for path in directory.iterdir() if not path.name.startswith(".") and path.resolve() not in input_files
    )
    if strange:
        raise RunError(
            "The folder is not empty and holds no run: its files might be overwritten.",
            where=f"-o {directory}",
            seen=", ".join(strange[:4]) + (f" and {len(strange) - 4} more" if len(strange) > 4 else ""),
            allowed="a new or empty folder, or one that `pipefit train` made",
            next_step="give another folder with -o",
        )


def _is_ours(path: Path) -> bool:
    """Return True if this config.json belongs to a run, not to a model or other program."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"plan", "run_dir", "optimizer", "steps"} <= data.keys()


def open_run_dir(config: TrainConfig, plan: Plan, device: torch.device) -> Path:
    """Create the run's folder with config.json, plan.json, environment.json and, if still available, cluster.json.

    Raises RunError if it cannot be written.
    """
    directory = Path(config.run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(codec.dump_text(config), encoding="utf-8")
        (directory / "plan.json").write_text(codec.dump_text(plan), encoding="utf-8")
        (directory / "environment.json").write_text(codec.dump_text(describe_environment(device)), encoding="utf-8")
        keep_cluster(plan, config, directory)
    except OSError as error:
        raise RunError("The run's folder cannot be written.", where=str(directory), seen=error) from None
    return directory


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return the software and the machine of rank 0, for the run's report."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "pipefit": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
        "host": platform.node(),
        "system": platform.platform(),
    }


def keep_cluster(plan: Plan, config: TrainConfig, directory: Path) -> None:
    """Write the plan's cluster beside the plan, so that the folder is complete; nothing if it is not known."""
    cluster = check_cluster(plan, config.plan, config.cluster)
    if cluster is not None and codec.content_digest(cluster) == plan.hashes.cluster:
        (directory / "cluster.json").write_text(codec.dump_text(cluster), encoding="utf-8")
