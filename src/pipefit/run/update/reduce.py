"""Gradient reduction: bucketed, started while the last backward still runs, finished before the norm is computed.

Every rank of a lane launches the buckets in the same order, because all of them run the same actions. A parameter
replicated along an axis has a partial gradient there (docs/design/sharding.md), so it is summed over exactly those
axes: all-reduced, or reduce-scattered to the owners of the optimizer state under ZeRO-1. A parameter tied between
lanes is then summed over them too, by the transfer rule of `layout.transfer_moves`. If stages on several lanes take
turns and hold a parameter in the same way, one sum covers the devices of all these lanes, once all have finished.

Under ZeRO-2 and ZeRO-3 the layers reduce-scatter their gradients themselves (`run.stage.sharded_layers`). Only the sum
of the owned runs over the other axes, if there are any, is left to the end of the step.

If groups of replicas shard the state (HSDP), gradients are reduce-scattered within the groups. The owned runs are then
all-reduced over the devices that own the same run in other groups, once a step, beside the rest of the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipefit.layout import AxisName, Mesh
from pipefit.run.transfers.comms import CommGroups, all_gather, reduce_scatter
from pipefit.run.update.buckets import GradientBucket
from pipefit.run.update.state_devices import state_devices
from pipefit.run.update.tied import TiedSum

PEER_LAG = 2
"""Buckets whose sum within the group starts before an earlier one, nearly complete by then, is summed over the other
groups. Of sharded layers, the layers of a backward after which the sum of one is complete."""


class GradientReducer:
    """Reduces the buckets of one lane, once per step.

    `ranks[device]` is a global rank; `groups[stage]` is a stage's mesh; `tied[name]` sums a parameter over lanes.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        comms: CommGroups,
        groups: Mapping[int, Mesh],
        device: int,
        ranks: Mapping[int, int],
        tied: Mapping[str, TiedSum],
    ) -> None:
        self.buckets = list(buckets)
        self._tied = tied
        self._jobs = [_BucketReduction(bucket, comms, groups[bucket.stage], device, ranks) for bucket in buckets]
        self._by_stage: dict[int, list[_BucketReduction]] = {}
        for job in self._jobs:
            if not job.bucket.waits_for_stages and not job.bucket.summing_devices:
                self._by_stage.setdefault(job.bucket.stage, []).append(job)

    def zero_gradients(self) -> None:
        """Clear all gradients, before the first backward of a step."""
        for job in self._jobs:
            job.reset_gradients()

    def layer_callback(self, stage: int) -> Callable[[int], None]:
        """Return the callback for the stage's last backward: layer indices arrive from last to first."""
        jobs = self._by_stage.get(stage, [])

        def on_layer(layer: int) -> None:
            for job in jobs:
                if not job.started and job.is_complete(layer):
                    job.start_reduction()
            for job in [job for job in jobs if job.started][:-PEER_LAG]:
                job.start_peer_sum()

        return on_layer

    def start_rest(self, stage: int) -> None:
        """Start the reductions of a stage that the callback has not started."""
        for job in self._by_stage.get(stage, []):
            if not job.started:
                job.start_reduction()

    def finish_reductions(self) -> None:
        """Start the remaining reductions, wait for all, and sum tied parameters over their lanes."""
        # Sums over several lanes come last.
        for job in sorted(self._jobs, key=lambda job: len(job.bucket.summing_devices)):
            if not job.started:
                job.start_reduction()
        for job in self._jobs:
            job.start_peer_sum()
        for job in self._jobs:
            job.wait_all()
        exchanges = [
            (self._tied[name], job.bucket.views[name])
            for job in self._jobs
            for name in job.bucket.views
            if name in self._tied
        ]
        exchanges.sort(key=lambda pair: pair[0].name)
        for exchange, view in exchanges:
            exchange.start_exchange(view)
        for exchange, view in exchanges:
            exchange.finish_exchange(view)

    def parts_sum(self, bucket: GradientBucket) -> Callable[[Tensor], None]:
        """Return the sum, in place, of a tensor over the ranks that together hold the bucket's parameters once."""
        return next(job.sum_parts for job in self._jobs if job.bucket is bucket)

    def start_gathers(self, stage: int) -> None:
        """All-gather the updated parameters of a stage under ZeRO-1 and ZeRO-2; otherwise do nothing."""
        for job in self._jobs:
            if job.bucket.stage == stage:
                job.start_gather()

    def finish_gathers(self) -> None:
        """Wait for the gathers, before parameters are used again."""
        for job in self._jobs:
            job.wait_all()


class _BucketReduction:
    """The collectives of one bucket."""

    def __init__(
        self, bucket: GradientBucket, comms: CommGroups, group: Mesh, device: int, ranks: Mapping[int, int]
    ) -> None:
        self.bucket = bucket
        self.started = self._peers_started = False
        self._work: Any = None
        entry = bucket.entries[0]
        state = state_devices(group, device, entry)

        def process_group(devices: Sequence[int], axes: Sequence[AxisName] = ()) -> Any:
            return comms.find_group([ranks[d] for d in group.spread_along(devices, axes)])

        late_axes = [name for name in entry.sum_over if name not in entry.state_axes]
        if bucket.summing_devices:
            self._sum = comms.find_group([ranks[d] for d in bucket.summing_devices])
        elif bucket.shards_gradients:
            self._sum = process_group(state.peers, late_axes)
        else:
            self._sum = process_group((device,), entry.sum_over)
        self._scatter = process_group(state.group)
        copied = {*entry.sum_over, *entry.alike_over, *entry.state_axes}
        self._parts = process_group(state.group, [axis.name for axis in group.axes if axis.name not in copied])
        self._scatters = (
            self._scatter is not None
            and not (bucket.is_tied or bucket.summing_devices or bucket.shards_gradients)
            and set(entry.state_axes) == set(entry.sum_over)
        )
        self._peers = process_group(state.peers) if self._scatters else None
        self._lag = 0 if not bucket.shards_gradients else PEER_LAG if len(state.peers) > 1 else None

    def is_complete(self, layer: int) -> bool:
        """Return whether the gradients are complete in a last backward that has finished this layer."""
        return self._lag is not None and self.bucket.first_layer >= layer + self._lag

    def reset_gradients(self) -> None:
        self.started = self._peers_started = False
        self.bucket.gradients.zero_()

    def start_reduction(self) -> None:
        self.started = True
        if self._sum is None:
            return
        if self._scatters:
            self._work = reduce_scatter(self.bucket.owned_gradients, self.bucket.gradients, self._scatter)
        else:
            summed = self.bucket.gradients
            if not self.bucket.shards_gradients:
                summed = summed[: self.bucket.used_elements]
            self._work = dist.all_reduce(summed, group=self._sum, async_op=True)

    def start_peer_sum(self) -> None:
        """Wait for the sum within the group, and start to sum the owned run over the other groups."""
        if self._peers is not None and not self._peers_started:
            self._peers_started = True
            self.wait_all()
            self._work = dist.all_reduce(self.bucket.owned_gradients, group=self._peers, async_op=True)

    def sum_parts(self, values: Tensor) -> None:
        if self._parts is not None:
            dist.all_reduce(values, group=self._parts)

    def start_gather(self) -> None:
        if self._scatter is not None and not self.bucket.shards_parameters:
            self._work = all_gather(self.bucket.parameters, self.bucket.owned_parameters, self._scatter)

    def wait_all(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
