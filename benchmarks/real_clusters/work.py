"""What compare.py has measured of one cluster, kept in a folder, so that much can be measured in parts.

The profile, what memory was learned, our plans, and every run, by its plan. `sessions` say when each part was measured,
and at which commit.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.lab.runs import Measured, lab_of, profiled, run_plans
from benchmarks.provenance import provenance
from benchmarks.real_clusters.memory import learned
from pipefit.cluster import Cluster, load_cluster
from pipefit.codec import content_digest, dump_text, from_data, to_data
from pipefit.cost.memory.correction_file import MemoryFacts, load_memory
from pipefit.model.graph import Model
from pipefit.plan.types import Plan

TOGETHER = 6
"""Plans that are run before what they took is kept."""

AGAIN = 2
"""How often a plan may be run whose run was invalid."""


class Unfinished(Exception):
    """The time is up, and there is more to run."""


class Work:
    """One cluster's measurements in a folder."""

    def __init__(self, folder: Path, name: str, seconds: float) -> None:
        self.folder, self.name, self.until = folder, name, time.monotonic() + seconds
        self.sessions: list[dict[str, Any]] = self._read("sessions.json", [])
        self._facts: MemoryFacts | None = None

    @classmethod
    @contextlib.contextmanager
    def kept(cls, folder: str | None, name: str, seconds: float) -> Iterator[Work]:
        """In FOLDER/NAME, or in a folder that goes away."""
        with tempfile.TemporaryDirectory() as passing:
            path = Path(folder or passing) / name
            path.mkdir(parents=True, exist_ok=True)
            yield cls(path, name, seconds)

    def profile(self, model: Model, sequence: int, quick: bool, options: Mapping[str, Any]) -> Cluster:
        """The cluster as it was measured, with these options of the profile: now, or before."""
        path = self.folder / "cluster.json"
        if not path.is_file():
            with lab_of(self.name) as lab:
                self._measuring("profile")
                found = profiled(lab, model, sequence, quick=quick, **options)
            path.write_text(dump_text(found), encoding="utf-8")
        return load_cluster(path)

    def facts(self, model: Model, cluster: Cluster) -> MemoryFacts:
        """What small plans teach about memory: now, or before."""
        path = self.folder / "memory.json"
        if not path.is_file():
            self._measuring("memory of small plans")
            path.write_text(dump_text(learned(cluster, model)), encoding="utf-8")
        self._facts = self._facts or load_memory(path)
        return self._facts

    def plans(self, make: Callable[[], Sequence[Plan | None]]) -> list[Plan | None]:
        """Our plans: made now, or before."""
        path = self.folder / "plans.json"
        if not path.is_file():
            path.write_text(json.dumps([to_data(plan) if plan else None for plan in make()]), encoding="utf-8")
        found = json.loads(path.read_text(encoding="utf-8"))
        return [from_data(Plan, plan, str(path)) if plan else None for plan in found]

    def runs(self, plans: Sequence[Plan], model: Model, steps: int, count_bytes: bool) -> list[Measured]:
        """Every plan's run, TOGETHER at a time. Raises Unfinished where the time is up before the last of them."""
        keys = [content_digest(replace(plan, prediction=None, alternatives=())) for plan in plans]
        known: dict[str, Any] = self._read("runs.json", {})

        def left() -> list[int]:
            unsure = {key for key in keys if key in known and not known[key]["valid"] and known[key]["tries"] < AGAIN}
            return [n for n, key in enumerate(keys) if key not in known or key in unsure]

        while todo := left():
            if time.monotonic() > self.until:
                raise Unfinished(f"{self.name}: {len(todo)} of {len(plans)} plans are to be run")
            devices = sorted(plans[todo[0]].used_devices)
            now = [n for n in todo if sorted(plans[n].used_devices) == devices][:TOGETHER]
            with lab_of(self.name) as lab:
                self._measuring(f"{len(now)} plans")
                found = run_plans(lab, [plans[n] for n in now], model, steps=steps, count_bytes=count_bytes)
            for n, run in zip(now, found, strict=True):
                tries = known.get(keys[n], {}).get("tries", 0) + 1
                known[keys[n]] = {**asdict(replace(run, trace=())), "tries": tries}
            (self.folder / "runs.json").write_text(json.dumps(known), encoding="utf-8")
        return [_measured(known[key]) for key in keys]

    def _measuring(self, what: str) -> None:
        """Note that something is measured now."""
        here = provenance()
        self.sessions.append(
            {
                "what": what,
                "commit": here["commit"],
                "date": here["date"],
                "load_average_1min": here["machine"].get("load_average_1min"),
            }
        )
        (self.folder / "sessions.json").write_text(json.dumps(self.sessions), encoding="utf-8")

    def _read(self, name: str, nothing: Any) -> Any:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else nothing


def _measured(data: dict[str, Any]) -> Measured:
    return Measured(
        step_s=tuple(data["step_s"]),
        valid=data["valid"],
        pace=data["pace"],
        trace=(),
        peak_bytes=tuple(data["peak_bytes"]),
    )
