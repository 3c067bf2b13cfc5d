"""The fingerprint of the software and machine of a profile, and the check before the profile is used.

Nothing here imports torch: versions come from the installed packages' metadata, so that a planner on another machine
can check too.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from pipefit import __version__
from pipefit.cluster.types import Cluster
from pipefit.errors import ClusterError

SOFTWARE = ("pipefit", "python", "torch", "cuda")
HARDWARE = ("driver", "cpu", "device")


def machine_fingerprint() -> dict[str, str]:
    """Return the local software and hardware: keys of `SOFTWARE` and `HARDWARE`, `threads` and `os`; absent if
    unknown."""
    facts = {
        "pipefit": __version__,
        "python": platform.python_version(),
        "torch": _package_version("torch"),
        "cuda": _cuda_version(),
        "driver": _first_match(r"Module\s+(\d[\d.]*)", _read_text("/proc/driver/nvidia/version")),
        "cpu": cpu_model(),
        "device": gpu_model(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "os": f"{platform.system()} {platform.release()}",
    }
    return {key: value for key, value in facts.items() if value}


def check_environment(
    cluster: Cluster, *, allow: bool = False, hardware: bool = True, here: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Compare the software and (`hardware`) the machine of `cluster`'s profile with `here` (default: this machine).

    A planner for a remote cluster omits the machine; a run on the cluster does not. Returns the differences in words.
    Raises ClusterError naming them, unless `allow`. A cluster from data sheets, or one without a fingerprint, passes.
    """
    then = cluster.provenance.environment
    if cluster.provenance.source != "measured" or not then:
        return ()
    now = machine_fingerprint() if here is None else here
    software = _find_differences(then, now, SOFTWARE)
    machine = _find_differences(then, now, HARDWARE) if hardware else ()
    if (software or machine) and not allow:
        what = "other software than is running now" if software else "another machine than this one"
        raise ClusterError(
            f"The cluster was measured with {what}.",
            where=f"cluster {cluster.name!r}, measured {cluster.provenance.when or 'at an unknown time'}",
            seen="; ".join((*software, *machine)),
            allowed="the versions that it was measured with",
            next_step="measure again with pipefit profile, or accept the differences with --allow-other-environment",
        )
    return (*software, *machine)


def cpu_model() -> str:
    """Return the processor's name."""
    model = _first_match(r"model name\s*:\s*(.+)", _read_text("/proc/cpuinfo"))
    return model or platform.processor() or platform.machine()


def gpu_model() -> str:
    """Return the name of the first NVIDIA GPU, '' without one."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        name = _first_match(r"Model:\s*(.+)", _read_text(str(path)))
        if name:
            return name
    return ""


def _find_differences(then: Mapping[str, str], now: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        f"{key} {then.get(key) or 'none'} then, {now.get(key) or 'none'} now"
        for key in keys
        if then.get(key, "") != now.get(key, "")
    )


def _package_version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cuda_version() -> str:
    """Return the CUDA version of the torch build, from its version file; '' for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    text = _read_text(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    return _first_match(r"^cuda[^=\n]*=\s*['\"]([\d.]+)['\"]", text)


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
