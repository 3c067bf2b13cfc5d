"""What was measured until something failed: a file beside the one that was asked for, written again and again while
measuring and removed at the end."""

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
    """The part of a profile that is known."""

    phase: str
    "What was being measured."
    members: tuple[ProfileMember, ...]
    lost: Mapping[str, str]
    "By rank: how it showed."
    inside: tuple[LinkSample, ...]
    rails: Mapping[str, tuple[LinkSample, ...]]
    layers: tuple[LayerCurve, ...]
    version: int = 1


class PartialFile:
    """Keeps `OUTPUT.partial.json` up to date; other ranks than 0 have None for a path and write nothing."""

    def __init__(self, output: Path | None) -> None:
        self.path = None if output is None else partial_path(output)
        self._last = 0.0

    def write(self, partial: PartialProfile, force: bool = False) -> None:
        """Replace the file, unless that was done a moment ago."""
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
    """`cluster.json` -> `cluster.partial.json`."""
    return output.with_name(f"{output.stem}.partial.json")


def load_partial(path: Path) -> PartialProfile:
    """What a failed profile left. FormatError if it is none."""
    return load_file(PartialProfile, path)
