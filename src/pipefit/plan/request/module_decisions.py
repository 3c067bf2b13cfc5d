"""The choices of a plan of several modules: those of each module, and what they have in common."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sampled_batches import StageShares
from pipefit.plan.types import Divide

OWN = ("replicas", "stages", "shards", "sharding", "recompute", "cuts")
"""Choices that every module makes for itself; the others hold for all."""

ALONE = ("stages", "cuts")
"""Choices that modules on the devices of another do not have: they lie whole on a lane."""


@dataclass(frozen=True, slots=True)
class MultiModuleConfig(ParallelConfig):
    """Several modules in the order of the chain, one stage a lane, on devices of their own; but for guests, which lie
    whole on every lane of the backbone and take turns there, and for modules in line with it, on its first or last
    lane."""

    modules: tuple[tuple[str, ParallelConfig], ...] = ()
    "Name of the module, and how it lies: its cuts and its devices are given. Of a guest, how it lies on one lane; of"
    " one in line, on the backbone's end."
    backbone: str = ""
    "The module with most work, whose devices others share."
    guests: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
    "Those in one stage on an end of the backbone: before it on its first lane, behind it on its last one."
    multiples: tuple[tuple[str, int], ...] = ()
    "Of guests that take several microbatches together, how many: they divide the count of microbatches."
    divided: tuple[str, ...] = ()
    "Modules whose replicas divide the images of a microbatch, in place of its samples."
    ahead: int = 1
    "The `window` of the order (`schedule.multiplexed`), where there are guests."

    @property
    def disjoint_modules(self) -> tuple[tuple[str, ParallelConfig], ...]:
        """The modules with devices of their own."""
        return tuple(one for one in self.modules if one[0] not in (*self.guests, *self.inline))

    def placement_of(self, module: str) -> str:
        """Its word: `disjoint`, `shared` or `inline`."""
        return "shared" if module in self.guests else "inline" if module in self.inline else "disjoint"

    @property
    def shared_modules(self) -> tuple[tuple[str, str], ...]:
        """The modules that share devices, each with its word."""
        return tuple((name, word) for name, _ in self.modules if (word := self.placement_of(name)) != "disjoint")

    def multiple_of(self, module: str) -> int:
        """How many microbatches a module takes together."""
        return dict(self.multiples).get(module, 1)

    @property
    def shares_of_stages(self) -> tuple[StageShares, ...]:
        """See `samples.Shares`."""
        return tuple(
            StageShares(own.replicas, self.multiple_of(name), self.divide_of(name)) for name, own in self.stages_of
        )

    def divide_of(self, module: str) -> Divide:
        """What its replicas divide."""
        return "images" if module in self.divided else "samples"

    def copy_count(self, module: str) -> int:
        """The stages that hold the same layers: for a guest as many as the backbone has lanes."""
        return dict(self.modules)[self.backbone].stage_count if module in self.guests else 1

    @property
    def stages_of(self) -> tuple[tuple[str, ParallelConfig], ...]:
        """For every stage its module and how that lies."""
        return tuple((name, own) for name, own in self.modules for _ in range(own.stage_count * self.copy_count(name)))

    @property
    def stage_count(self) -> int:
        return len(self.stages_of)

    @property
    def lane_of_stage(self) -> tuple[int, ...]:
        first, lanes = {}, 0
        for name, own in self.disjoint_modules:
            first[name] = lanes
            lanes += own.stage_count
        found: list[int] = []
        for name, own in self.modules:
            if name in self.inline:
                found.append(first[self.backbone] + self.inline_lane(name))
                continue
            start = first[self.backbone if name in self.guests else name]
            found += range(start, start + own.stage_count * self.copy_count(name))
        return tuple(found)

    def inline_lane(self, module: str) -> int:
        """The lane of the backbone on which a module in line with it lies."""
        names = [name for name, _ in self.modules]
        behind = names.index(module) > names.index(self.backbone)
        return dict(self.modules)[self.backbone].stage_count - 1 if behind else 0

    def in_grid(self, module: str) -> bool:
        """Whether a module in line with the backbone has its replicas and shards, in place of a grid of its own."""
        own, other = dict(self.modules)[module], dict(self.modules)[self.backbone]
        return (own.replicas, own.shards) == (other.replicas, other.shards)

    @property
    def guest_stages(self) -> tuple[int, ...]:
        """The stages of guests."""
        return tuple(stage for stage, (name, _) in enumerate(self.stages_of) if name in self.guests)

    @property
    def lane_count(self) -> int:
        return sum(own.stage_count for _, own in self.disjoint_modules)

    @property
    def device_count(self) -> int:
        return sum(own.device_count for _, own in self.disjoint_modules)

    @property
    def is_sharded(self) -> bool:
        return any(own.is_sharded for _, own in self.modules)

    def lane_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every lane, in grid order (replica, shard)."""
        return tuple(itertools.chain.from_iterable(own.lane_devices() for _, own in self.disjoint_modules))

    def to_constraints(self, cuts: tuple[int, ...]) -> dict[str, str]:
        """The choices as a plan file and `--fix` write them: `vision.replicas`, ..."""
        found = {}
        for name, own in self.modules:
            words, guest = own.to_constraints(own.cuts), name in (*self.guests, *self.inline)
            found.update({f"{name}.{key}": words[key] for key in OWN if words[key] and not (guest and key in ALONE)})
            if not guest:
                found[f"{name}.devices"] = str(own.device_count)
            if name != self.backbone:
                found[f"{name}.placement"] = self.placement_of(name)
            if name in self.divided:
                found[f"{name}.divide"] = "images"
            if name in self.guests:
                found[f"{name}.multiple"] = str(self.multiple_of(name))
        common = {"microbatches": self.microbatches, "schedule": self.schedule, "zero1": str(self.zero1).lower()}
        if self.guests:
            common["ahead"] = self.ahead
        common["modules"] = "shared" if self.guests else "inline" if self.inline else "disjoint"
        return {**found, **{key: str(value) for key, value in common.items()}}

    def to_text(self) -> str:
        """In one short line for people."""
        each = []
        for name, own in self.modules:
            shards = f" x {len(own.shards)} shards" if own.is_sharded else ""
            again = f", recompute {own.recompute[0]}" if own.recompute != ("none",) else ""
            again += ", images divided" if name in self.divided else ""
            if name in self.guests:
                turns = f"{len(own.replicas)} replicas{shards} on each of {self.copy_count(name)} lanes"
                if self.multiple_of(name) > 1:
                    turns += f", {self.multiple_of(name)} microbatches together"
                each.append(f"{name} on those of {self.backbone}: {turns}{again}")
                continue
            if name in self.inline:
                end = "last" if self.inline_lane(name) else "first"
                grid = "" if self.in_grid(name) else f", {len(own.replicas)} replicas{shards}"
                each.append(f"{name} on the {end} lane of {self.backbone}{grid}{again}")
                continue
            each.append(
                f"{name} on {own.device_count}: {len(own.replicas)} replicas x {own.stage_count} stages{shards}{again}"
            )
        return f"{'; '.join(each)}; {self.microbatches} microbatches, {self.schedule}"
