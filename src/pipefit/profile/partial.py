"""The measurements of a failed profile: a file beside the requested output, rewritten regularly while measuring and
removed at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipefit.cluster.measured import LayerCurve
from pipefit.codec import dump_text, load_file
from pipefit.profile.facts import ProfileMember
from pipefit.profile.links import LinkSample

BETWEEN_WRITES_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialProfile:
    """The completed part of a profile."""

    phase: str
    "The phase that was running."
    members: tuple[ProfileMember, ...]
    lost: Mapping[str, str]
    "By rank: the symptom."
    inside: tuple[LinkSample, ...]
    rails: Mapping[str, tuple[LinkSample, ...]]
    layers: tuple[LayerCurve, ...]
    version: int = 1


class PartialFile:
    """Keeps `OUTPUT.partial.json` up to date; ranks other than 0 have no path and write nothing."""

    def __init__(self, output: Path | None) -> None:
        self.path = None if output is None else partial_path(output)
        self._last = 0.0

    def write(self, partial: PartialProfile, force: bool = False) -> None:
        """Replace the file, unless it was written less than 2 s ago."""
        if self.path is None or (not force and time.monotonic() - self._last < BETWEEN_WRITES_S):
            return
        aside = self.path.with_name(self.path.name + ".new")
        aside.write_text(dump_text(partial), encoding="utf-8")
        os.replace(aside, self.path)
        self._last = time.monotonic()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def partial_path(output: Path) -> Path:
    """Return `cluster.partial.json` for `cluster.json`."""
    return output.with_name(f"{output.stem}.partial.json")


def load_partial(path: Path) -> PartialProfile:
    """Load the file of a failed profile. Raises FormatError if it is not one."""
    return load_file(PartialProfile, path)
