"""What the pool's processes run for the tests of sharded layers."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from tests.support import worker_cases as cases

from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.checkpoint.pieces import as_bytes
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.stage.sharded_layers import ShardedBucket, ShardedLayers
from pipefit.run.update import reduce
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.evaluation import LaneEvaluation
from pipefit.run.worker.state import model_pieces, optimizer_pieces


class Watch:
    """The most layers with complete parameters, and with complete gradients, at the same time."""

    def __init__(self, layers: ShardedLayers) -> None:
        self.layers, self.most = layers, [0, 0]

    def look(self) -> None:
        held = [self.count(lambda b: b._complete), self.count(lambda b: bool(b._gradients is not None or b._reduction))]
        self.most = [max(pair) for pair in zip(self.most, held, strict=True)]

    def count(self, holds: Any) -> int:
        return sum(any(map(holds, buckets)) for buckets in self.layers._layers.values())


def kept_bytes(plan: Plan, model: Model, vocabulary: int) -> dict[str, Any]:
    """Elements in storage by kind of bucket, after two steps and an evaluation, and the most during them."""
    worker = cases.build(plan, model)
    (program,) = worker.programs.values()
    layers = program._sharded
    watch = Watch(layers)
    for name in ("start_gather", "begin_gradients", "start_reduction"):
        _watch_calls(layers, name, watch)
    cases.train(worker, plan, vocabulary, range(2))
    rows = cases.ArrayRows(plan.job.sequence, vocabulary, plan.job.documents)
    LaneEvaluation(worker).run_batch(
        make_inputs(plan, worker.device, rows, cases.step_rows(plan, 0), torch.device("cpu"))
    )
    result: dict[str, Any] = {
        kind: {
            "buckets": len(buckets),
            "layers": max((len({entry.layer for entry in bucket.entries}) for bucket in buckets), default=0),
            "elements": sum(bucket.parameters.numel() for bucket in buckets),
            "parameters": sum(_stored(bucket.parameters, bucket.owned_parameters) for bucket in buckets),
            "gradients": sum(_stored(bucket.gradients) for bucket in buckets),
        }
        for kind, buckets in {
            "sharded": [bucket for bucket in worker.buckets if bucket.shards_gradients],
            "tied": [bucket for bucket in worker.buckets if not bucket.shards_gradients],
        }.items()
    }
    result["stale"] = [
        name for name in layers.names if getattr(program.parameters[name], "main_grad", None) is not None
        or program.parameters[name].grad is not None
    ]  # fmt: skip
    result["in_flight"] = sum(
        bucket._work is not None or bucket._reduction is not None or bucket._gradients is not None
        for buckets in layers._layers.values()
        for bucket in buckets
    )
    result["most_parameters"], result["most_gradients"] = watch.most
    return result


def held_pieces(plan: Plan, model: Model, vocabulary: int) -> list[tuple[object, str]]:
    """(what is held, digest of its bits) of every owned run of this rank, after some clipped steps."""
    worker = cases.build(plan, model, replace(cases.OPTIMIZER, max_norm=0.05))
    cases.train(worker, plan, vocabulary, range(3))
    pieces = optimizer_pieces(worker, saving=False) + model_pieces(worker, saving=False)
    return [
        ((piece.name, piece.box, piece.flat), sha256(as_bytes(piece.tensor).numpy().tobytes()).hexdigest())
        for piece in pieces
    ]


def early_sums(plan: Plan, model: Model, vocabulary: int) -> tuple[int, int]:
    """(sums over other groups that start while the last backward runs, all of a step), of a step with small buckets."""
    worker = build_worker(plan, model, cases.comms(), torch.device("cpu"), cases.OPTIMIZER, bucket_bytes=1)
    (program,) = worker.programs.values()
    started: list[bool] = []
    call = reduce.dist.all_reduce

    def counted(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op:
            started.append(program.on_layer_gradients is not None)
        return call(tensor, group=group, async_op=async_op)

    reduce.dist.all_reduce = counted  # type: ignore[assignment]
    try:
        cases.train(worker, plan, vocabulary, range(1))
    finally:
        reduce.dist.all_reduce = call
    return sum(started), len(started)


def _watch_calls(layers: ShardedLayers, name: str, watch: Watch) -> None:
    for buckets in layers._layers.values():
        for bucket in buckets:
            call = getattr(bucket, name)

            def watched(call: Any = call) -> None:
                call()
                watch.look()

            setattr(bucket, name, watched)
    assert ShardedBucket


def _stored(*tensors: torch.Tensor) -> int:
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() // t.itemsize for t in tensors}
    return sum(sizes.values())
