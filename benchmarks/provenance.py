"""The origin of a benchmark's result: commit, versions, machine, date, command. The harness adds it to results."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "scipy", "numba", "torch", "transformers", "safetensors")


def provenance() -> dict[str, Any]:
    """Everything that is needed to repeat the run, as JSON data. Names no host, user or path of the machine."""
    return {
        "commit": _commit(),
        "command": " ".join([f"python -m {module_name()}", *_arguments()]),
        "date": datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": _machine(),
    }


def module_name() -> str:
    """Return the name of the program's module, from its path in the repository."""
    path = Path(sys.argv[0]).resolve()
    return ".".join(path.relative_to(ROOT).with_suffix("").parts) if path.is_relative_to(ROOT) else path.stem


def _arguments() -> list[str]:
    """The arguments, with paths cut to their names."""
    return [Path(argument).name if os.sep in argument else argument for argument in sys.argv[1:]]


def _commit() -> str:
    """The commit, marked `+changes` if a source file differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--", "src", "benchmarks/*.py") else "")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {"processor": _processor(), "system": platform.system(), "cores": usable}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if hasattr(os, "getloadavg"):
        facts["load_average_1min"] = round(os.getloadavg()[0], 1)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
    return facts


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
