"""The choices of a plan of several modules: those of each module, and what they have in common."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pipefit.plan.decisions import Decisions

OWN = ("replicas", "stages", "shards", "sharding", "recompute", "cuts")
"""Choices that every module makes for itself; the others hold for all."""


@dataclass(frozen=True, slots=True)
class ModuleDecisions(Decisions):
    """Several modules on devices of their own, one stage a lane, in the order of the chain."""

    modules: tuple[tuple[str, Decisions], ...] = ()
    "Name of the module, and how it lies: its cuts and its devices are given."

    @property
    def stage_count(self) -> int:
        return sum(own.stage_count for _, own in self.modules)

    @property
    def lane_of_stage(self) -> tuple[int, ...]:
        return tuple(range(self.stage_count))

    @property
    def lanes(self) -> int:
        return self.stage_count

    @property
    def device_count(self) -> int:
        return sum(own.device_count for _, own in self.modules)

    @property
    def is_sharded(self) -> bool:
        return any(own.is_sharded for _, own in self.modules)

    def lane_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every lane, in grid order (replica, shard)."""
        return tuple(itertools.chain.from_iterable(own.lane_devices() for _, own in self.modules))

    def words(self, cuts: tuple[int, ...]) -> dict[str, str]:
        """The choices as a plan file and `--fix` write them: `vision.replicas`, ..."""
        found = {}
        for name, own in self.modules:
            words = own.words(own.cuts)
            found.update({f"{name}.{key}": words[key] for key in OWN if words[key]})
            found[f"{name}.devices"] = str(own.device_count)
        common = {"microbatches": self.microbatches, "schedule": self.schedule, "zero1": str(self.zero1).lower()}
        return {**found, **{key: str(value) for key, value in common.items()}, "modules": "disjoint"}

    def text(self) -> str:
        """In one short line for people."""
        each = []
        for name, own in self.modules:
            shards = f" x {len(own.shards)} shards" if own.is_sharded else ""
            again = f", recompute {own.recompute[0]}" if own.recompute != ("none",) else ""
            each.append(
                f"{name} on {own.device_count}: {len(own.replicas)} replicas x {own.stage_count} stages{shards}{again}"
            )
        return f"{'; '.join(each)}; {self.microbatches} microbatches, {self.schedule}"
