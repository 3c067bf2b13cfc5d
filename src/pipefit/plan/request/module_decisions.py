"""The choices of a plan of several modules: those of each module, and the common ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sampled_batches import StageShares
from pipefit.plan.types import Divide

MODULE_CHOICES = ("replicas", "stages", "shards", "sharding", "recompute", "cuts")
"""Choices made separately for every module; the rest hold for all."""

LANE_CHOICES = ("stages", "cuts")
"""Choices that modules on another module's devices do not have: they lie undivided on a lane."""


@dataclass(frozen=True, slots=True)
class MultiModuleConfig(ParallelConfig):
    """Layout of several modules in the order of the chain.

    Each module has one stage per lane on separate devices, with two exceptions. A guest lies undivided on every lane of
    the backbone and processes microbatches there round-robin. An inline module lies on the first or last lane of the
    backbone.
    """

    modules: tuple[tuple[str, ParallelConfig], ...] = ()
    """Name and layout of each module, with its cuts and devices. A guest's layout is that on one lane; an inline
    module's is that on the end of the backbone."""
    backbone: str = ""
    "The module with the most work, whose devices are shared."
    guests: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
    "Modules in one stage on an end of the backbone: before it on its first lane, after it on its last."
    multiples: tuple[tuple[str, int], ...] = ()
    "For guests that process several microbatches per call, their number: a divisor of the microbatch count."
    divided: tuple[str, ...] = ()
    "Modules whose replicas divide the images of a microbatch instead of its samples."
    ahead: int = 1
    "The `window` of the order (`schedule/modules/multiplexed.py`), if there are guests."

    @property
    def disjoint_modules(self) -> tuple[tuple[str, ParallelConfig], ...]:
        """The modules with separate devices."""
        return tuple(module for module in self.modules if module[0] not in (*self.guests, *self.inline))

    def placement_of(self, module: str) -> str:
        """Return the placement of a module: `disjoint`, `shared` or `inline`."""
        return "shared" if module in self.guests else "inline" if module in self.inline else "disjoint"

    @property
    def shared_modules(self) -> tuple[tuple[str, str], ...]:
        """The modules that share devices, each with its placement."""
        return tuple((name, word) for name, _ in self.modules if (word := self.placement_of(name)) != "disjoint")

    def multiple_of(self, module: str) -> int:
        """Return the microbatches that a module processes per call."""
        return dict(self.multiples).get(module, 1)

    @property
    def shares_of_stages(self) -> tuple[StageShares, ...]:
        """The shares of every stage (`Shares` in `sampled_batches.py`)."""
        return tuple(
            StageShares(config.replicas, self.multiple_of(name), self.divide_of(name))
            for name, config in self.stages_of
        )

    def divide_of(self, module: str) -> Divide:
        """Return the unit that the module's replicas divide."""
        return "images" if module in self.divided else "samples"

    def copy_count(self, module: str) -> int:
        """Return the number of stages with the same layers: for a guest, the lanes of the backbone."""
        return dict(self.modules)[self.backbone].stage_count if module in self.guests else 1

    @property
    def stages_of(self) -> tuple[tuple[str, ParallelConfig], ...]:
        """The module and its layout for every stage."""
        return tuple(
            (name, config) for name, config in self.modules for _ in range(config.stage_count * self.copy_count(name))
        )

    @property
    def stage_count(self) -> int:
        return len(self.stages_of)

    @property
    def lane_of_stage(self) -> tuple[int, ...]:
        first, lanes = {}, 0
        for name, config in self.disjoint_modules:
            first[name] = lanes
            lanes += config.stage_count
        stage_lanes: list[int] = []
        for name, config in self.modules:
            if name in self.inline:
                stage_lanes.append(first[self.backbone] + self.inline_lane(name))
                continue
            start = first[self.backbone if name in self.guests else name]
            stage_lanes += range(start, start + config.stage_count * self.copy_count(name))
        return tuple(stage_lanes)

    def inline_lane(self, module: str) -> int:
        """Return the lane of the backbone that holds an inline module."""
        names = [name for name, _ in self.modules]
        behind = names.index(module) > names.index(self.backbone)
        return dict(self.modules)[self.backbone].stage_count - 1 if behind else 0

    def in_grid(self, module: str) -> bool:
        """Return whether an inline module uses the backbone's replicas and shards, not a separate grid."""
        config, backbone = dict(self.modules)[module], dict(self.modules)[self.backbone]
        return (config.replicas, config.shards) == (backbone.replicas, backbone.shards)

    @property
    def guest_stages(self) -> tuple[int, ...]:
        """The stages of guests."""
        return tuple(stage for stage, (name, _) in enumerate(self.stages_of) if name in self.guests)

    @property
    def lane_count(self) -> int:
        return sum(config.stage_count for _, config in self.disjoint_modules)

    @property
    def device_count(self) -> int:
        return sum(config.device_count for _, config in self.disjoint_modules)

    @property
    def is_sharded(self) -> bool:
        return any(config.is_sharded for _, config in self.modules)

    def lane_devices(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of every lane, in grid order (replica, shard)."""
        return tuple(itertools.chain.from_iterable(config.lane_devices() for _, config in self.disjoint_modules))

    def to_constraints(self, cuts: tuple[int, ...]) -> dict[str, str]:
        """Return the choices in the form of plan files and `--fix`: `vision.replicas`, ..."""
        constraints = {}
        for name, config in self.modules:
            words, guest = config.to_constraints(config.cuts), name in (*self.guests, *self.inline)
            constraints.update(
                {
                    f"{name}.{key}": words[key]
                    for key in MODULE_CHOICES
                    if words[key] and not (guest and key in LANE_CHOICES)
                }
            )
            if not guest:
                constraints[f"{name}.devices"] = str(config.device_count)
            if name != self.backbone:
                constraints[f"{name}.placement"] = self.placement_of(name)
            if name in self.divided:
                constraints[f"{name}.divide"] = "images"
            if name in self.guests:
                constraints[f"{name}.multiple"] = str(self.multiple_of(name))
        common = {"microbatches": self.microbatches, "schedule": self.schedule, "sharded_state": self.sharded_state}
        if self.guests:
            common["ahead"] = self.ahead
        common["modules"] = "shared" if self.guests else "inline" if self.inline else "disjoint"
        return {**constraints, **{key: str(value) for key, value in common.items()}}

    def to_text(self) -> str:
        """Return the choices as one short line."""
        descriptions = []
        for name, config in self.modules:
            shards = f" x {len(config.shards)} shards" if config.is_sharded else ""
            again = f", recompute {config.recompute[0]}" if config.recompute != ("none",) else ""
            again += ", images divided" if name in self.divided else ""
            if name in self.guests:
                turns = f"{len(config.replicas)} replicas{shards} on each of {self.copy_count(name)} lanes"
                if self.multiple_of(name) > 1:
                    turns += f", {self.multiple_of(name)} microbatches together"
                descriptions.append(f"{name} on the devices of {self.backbone}: {turns}{again}")
                continue
            if name in self.inline:
                end = "last" if self.inline_lane(name) else "first"
                grid = "" if self.in_grid(name) else f", {len(config.replicas)} replicas{shards}"
                descriptions.append(f"{name} on the {end} lane of {self.backbone}{grid}{again}")
                continue
            descriptions.append(
                f"{name} on {config.device_count} devices: {len(config.replicas)} replicas x {config.stage_count} "
                f"stages{shards}{again}"
            )
        return f"{'; '.join(descriptions)}; {self.microbatches} microbatches, {self.schedule}"
