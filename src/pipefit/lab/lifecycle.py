"""Create, hold and remove a lab, including the remains of a lab whose process was killed.

A lab creates nothing in the kernel but namespaces called `pflab-ID-...`, where ID is derived from the lab file's path.
Links, bridges and shaping live inside the namespaces and disappear with them. So `take_down` needs no state: it kills
all processes in namespaces of that name and deletes them. A file lock, which the kernel releases when its owner dies,
marks a lab as in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pipefit.cluster.topology import device_count
from pipefit.codec import content_digest
from pipefit.errors import LabError
from pipefit.lab import netns, network
from pipefit.lab.spec import LabFile, load_lab, require_memory
from pipefit.units import format_bandwidth

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal(BaseException):
    """A signal asked this process to end. The holder of a lab takes it down while this exception propagates."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"signal {number}")


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab file with the names of its namespaces. Creating this object does not touch the kernel."""

    path: Path
    file: LabFile

    @classmethod
    def open_lab(cls, path: str | Path) -> Lab:
        """Read a lab file. Raises the errors of `spec.load_lab`."""
        return cls(Path(path).resolve(), load_lab(path))

    @property
    def id(self) -> str:
        """Six hex digits derived from the file's path."""
        return lab_id(self.path)

    @property
    def name_prefix(self) -> str:
        """Common prefix of the lab's namespaces."""
        return f"{netns.PREFIX}{self.id}-"

    @property
    def hub_namespace(self) -> str:
        """Namespace of the bridges."""
        return self.name_prefix + network.HUB

    def namespace_of(self, host: int) -> str:
        """Return the namespace of a host."""
        return self.name_prefix + network.host_namespace(host)


def lab_id(path: str | Path) -> str:
    """Return the id of a lab file; it is the same for every spelling of the path."""
    return hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:6]


def state_folder() -> Path:
    """Return the folder of locks and state files. They are small and disappear at a restart, as namespaces do."""
    base = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    return base / "pipefit-lab"


def bring_up(lab: Lab) -> None:
    """Create the lab after removing the remains of an earlier one. A failure or a signal leaves nothing behind."""
    netns.require_namespaces()
    require_memory(device_count(lab.file.cluster), available_bytes(), str(lab.path))
    remove_abandoned()
    with _signals_stop(), _lock_lab(lab.path):
        remove_lab(lab.path)
        try:
            _make_lab(lab)
            _state_path(lab.id).write_text(json.dumps(_lab_facts(lab)) + "\n", encoding="utf-8")
        except BaseException:
            with _ignore_signals():
                remove_lab(lab.path)
            raise


def take_down(path: str | Path) -> list[str]:
    """Remove a lab in any state and return the names of the removed namespaces. The file need not exist any more.

    Raises LabError if a living process uses the lab.
    """
    netns.require_namespaces()
    with _lock_lab(path):
        return remove_lab(path)


@contextlib.contextmanager
def hold_lab(lab: Lab) -> Iterator[None]:
    """Hold the lab for a command. A lab that is already up stays up; otherwise it is created now and always taken down
    afterwards.

    SIGINT, SIGTERM and SIGHUP raise `StopSignal` inside.
    """
    netns.require_namespaces()
    remove_abandoned()
    with _signals_stop(), _lock_lab(lab.path):
        is_temporary = not is_standing(lab)
        try:
            if is_temporary:
                remove_lab(lab.path)
                _make_lab(lab)
            yield
        finally:
            with _ignore_signals():
                if is_temporary:
                    remove_lab(lab.path)


def is_standing(lab: Lab) -> bool:
    """Return True if the lab is up and complete. Raises LabError if another version of the file is up."""
    there = netns.standing_namespaces(lab.name_prefix)
    state = _read_state(lab.id)
    if not there or state is None or sorted(there) != sorted(state["namespaces"]):
        return False
    if state["digest"] != content_digest(lab.file):
        raise LabError(
            "Another version of this lab file is up.",
            where=str(lab.path),
            seen=f"{state['digest']} is up, the file is {content_digest(lab.file)}",
            next_step=f"pipefit lab up {lab.path}",
        )
    return True


def remove_lab(path: str | Path) -> list[str]:
    """Kill and delete everything that belongs to the lab of this file. The caller holds its lock."""
    return _remove_parts(lab_id(path))


def remove_abandoned() -> list[str]:
    """Delete the labs of killed commands. Their lock names a dead process. Labs of `lab up` stay.
    Returns the names of the removed namespaces."""
    names = []
    for lock_path in state_folder().glob("*.lock"):
        ident = lock_path.stem
        if _state_path(ident).exists():
            continue
        with contextlib.suppress(OSError), lock_path.open("r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = handle.read().strip()
            if owner.isdigit() and not Path("/proc", owner).exists():
                names += _remove_parts(ident)
                lock_path.unlink()
    return names


def _remove_parts(ident: str) -> list[str]:
    names = netns.standing_namespaces(f"{netns.PREFIX}{ident}-")
    netns.remove_namespaces(names)
    with contextlib.suppress(FileNotFoundError):
        _state_path(ident).unlink()
    for folder in state_folder().glob(f"{ident}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    return names


@contextlib.contextmanager
def scratch_folder(lab: Lab) -> Iterator[Path]:
    """Yield a temporary folder. If the process is killed, the folder is removed with the lab."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{lab.id}-", dir=state_folder()) as folder:
        yield Path(folder)


def describe_lab(lab: Lab) -> list[str]:
    """Describe the hosts, rates and racks of a lab, in lines for people."""
    rates, cluster = network.rates_of(lab.file), lab.file.cluster
    lines = [
        f"lab {cluster.name} ({lab.name_prefix}*): {len(cluster.hosts)} hosts, "
        f"packets of {network.packet_bytes(lab.file)} bytes"
    ]
    for h, host in enumerate(cluster.hosts):
        host_rates = [rate for rate in rates.pair[h] if rate]
        to = (
            f"to others {format_bandwidth(min(host_rates))} to {format_bandwidth(max(host_rates))}, "
            if host_rates
            else ""
        )
        paced = "paced" if host.kind in lab.file.devices else "not paced"
        lines.append(
            f"  {host.name}: {lab.namespace_of(h)}, {network.device_address(h)}, {host.devices} x {host.kind} "
            f"({paced}), {to}"
            f"port {format_bandwidth(rates.send[h])} out, {format_bandwidth(rates.receive[h])} in"
        )
    for rack, way_up, way_down in zip(lab.file.uplinks, rates.up, rates.down, strict=True):
        lines.append(
            f"  rack {rack.name} ({', '.join(rack.hosts)}): {format_bandwidth(way_up)} up, "
            f"{format_bandwidth(way_down)} down"
        )
    lines += [f"  not made: {note}" for note in network.unmade_facts(cluster, rates)]
    return lines


def available_bytes() -> int:
    """Return the memory that programs can still allocate on this machine."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def _make_lab(lab: Lab) -> None:
    hosts = range(len(lab.file.cluster.hosts))
    netns.add_namespaces([lab.hub_namespace, *(lab.namespace_of(h) for h in hosts)])
    netns.apply_settings(lab.hub_namespace, network.QUIET)
    netns.run_batch(["ip", "-n", lab.hub_namespace], network.hub_lines(lab.file, lab.name_prefix))
    for h in hosts:
        name = lab.namespace_of(h)
        netns.apply_settings(name, network.host_settings(lab.file, h))
        netns.run_batch(["ip", "-n", name], network.host_lines(lab.file, h))
        netns.run_batch(["tc", "-n", name], network.host_shaping(lab.file, h))
    netns.run_batch(["tc", "-n", lab.hub_namespace], network.hub_shaping(lab.file))


def _lab_facts(lab: Lab) -> dict[str, Any]:
    return {
        "file": str(lab.path),
        "digest": content_digest(lab.file),
        "namespaces": netns.standing_namespaces(lab.name_prefix),
    }


def _state_path(ident: str) -> Path:
    return state_folder() / f"{ident}.json"


def _read_state(ident: str) -> dict[str, Any] | None:
    try:
        data = json.loads(_state_path(ident).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and {"digest", "namespaces"} <= data.keys() else None


@contextlib.contextmanager
def _lock_lab(path: str | Path) -> Iterator[None]:
    """Lock the lab for one process. The lock file is removed on release."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    lock_path = folder / f"{lab_id(path)}.lock"
    with _open_locked(lock_path, path) as handle:
        handle.write(str(os.getpid()))
        handle.flush()
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def _open_locked(place: Path, path: str | Path) -> IO[str]:
    while True:
        handle = place.open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen = f"process {_read_owner(handle)} holds it"
            handle.close()
            raise LabError(
                "The lab is in use.",
                where=str(path),
                seen=seen,
                next_step="wait for that command, or end it: it removes its lab",
            ) from None
        if place.exists() and os.fstat(handle.fileno()).st_ino == place.stat().st_ino:
            handle.seek(0)
            handle.truncate()
            return handle
        handle.close()  # its last owner removed the file after we opened it


def _read_owner(handle: IO[str]) -> str:
    handle.seek(0)
    return handle.read().strip() or "unknown"


@contextlib.contextmanager
def _signals_stop() -> Iterator[None]:
    def raise_stop(number: int, frame: FrameType | None) -> None:
        raise StopSignal(number)

    with _set_handlers(raise_stop):
        yield


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore further signals during the cleanup."""
    with _set_handlers(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _set_handlers(handler: Any, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
