"""One stage on one device: parameters, forward, fused backward, and the backward split into I and W.

The layers of a stage are operator graphs (already sharded: local shapes, collectives as operators). Autograd runs them,
with three changes: linear layers defer their weight gradients to W, attention reads earlier slices, and recomputation
saves less. Every gradient is added into a buffer bound by the worker (`bind_gradients`). This file does not allocate
gradients, communicate between stages, or wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pipefit.model.graph import Graph
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.compile import LayerFunction, compile_layer
from pipefit.run.stage.parameters import bind_buffer, make_parameters
from pipefit.run.stage.recompute import AutogradSegment, split_segments
from pipefit.run.stage.sharded_layers import ShardedLayers
from pipefit.run.stage_inputs import StageInputs

Tensors = dict[str, torch.Tensor]

LOSS = "loss"
"""The key of a stage's loss among its outputs."""


@dataclass(frozen=True, slots=True)
class StageLayer:
    """One layer of a stage: its name in the model, its local graph, and local -> global parameter names."""

    name: str
    graph: Graph
    parameters: Mapping[str, str]
    shares: tuple[int, ...] = ()
    "Shares of all devices along the shard axis, if the layer has its own; empty: those of the stage."


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """The place of a stage in its model, its mesh and its job."""

    recompute: Literal["none", "selective", "full"] = "none"
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    "The computing type."
    products: str = ""
    "`fp8` if blocks multiply in FP8."
    shard: ShardContext | None = None
    sequence: ShardContext | None = None
    "The position on the context axis, if there is one."
    experts: ShardContext | None = None
    "The position on an expert axis and its shards together."
    seed: int = 0
    first_layer_index: int = 0
    "The index of the first layer in the model."
    slices: int = 1
    "Slices per microbatch."
    modules: Mapping[str, torch.nn.Module] | None = None
    "The user's own modules, for opaque operators."
    backend: str | None = "auto"
    "The torch.compile backend of pointwise regions; None for eager; auto: inductor on CUDA."
    backward: bool = True
    "Without it a forward saves nothing: the stage and all stages before it are frozen."
    input_gradient: bool = True
    "Without it all stages before this one are frozen."
    side_loss: str = ""
    "The last layer's name for a loss besides the hidden state."
    released: Collection[str] = ()
    "Parameters that get their storage from sharded layers (ZeRO-3)."


class StageProgram:
    """The executable form of consecutive layers on one device.

    Hidden states are (B, T, D) under the key ''. The last stage of a module with a loss returns `loss`, a scalar in
    float32 or wider, the sum over its labels, alone or with the hidden state for another module. The record of every
    forward is kept until its B or W, under (microbatch, slice).
    """

    def __init__(self, layers: Sequence[StageLayer], setup: StageSetup = StageSetup()) -> None:
        self.layers = tuple(layers)
        self.setup = setup
        self.recompute = setup.recompute
        self.device = torch.device(setup.device)
        self.dtype = setup.dtype
        self.shard, self.sequence, self.experts = setup.shard, setup.sequence, setup.experts
        self.slices = setup.slices
        self.backend = setup.backend
        if setup.backend == "auto":
            self.backend = "inductor" if self.device.type == "cuda" else None
        self.on_layer_gradients: Callable[[int], None] | None = None
        "Called with the layer's index in this stage when its gradients of the running B or W are complete."
        self.parameters = make_parameters(self.layers, self.device, setup.dtype, setup.released)
        self.functions = [self._compile_layer(index, layer) for index, layer in enumerate(layers)]
        self.keeps = setup.backward
        trains = [any(spec.trainable for spec in layer.graph.parameters) for layer in self.layers]
        self.frozen = 0 if setup.input_gradient or True not in trains else trains.index(True)
        "Number of leading layers without a backward."
        self.input_gradient = setup.input_gradient
        self.stretches: list[AutogradSegment] = split_segments(
            self.layers, self.functions, setup.recompute, self.frozen
        )
        self.side_loss = setup.side_loss
        self.has_loss = self.functions[-1].returns_loss or bool(setup.side_loss)
        self.divisor = 1
        self.step = 0
        self._seed_gradient: torch.Tensor | None = None
        self._records: dict[tuple[int, int], SavedForward] = {}
        self._past: dict[int, dict[Any, Any]] = {}
        self._bound = False
        self._sharded: ShardedLayers | None = None

    def _compile_layer(self, place: int, layer: StageLayer) -> LayerFunction:
        shard = replace(self.shard, shares=layer.shares) if self.shard is not None and layer.shares else self.shard
        contexts = [
            OperatorContext(
                graph=layer.graph,
                layer=place,
                model_layer=self.setup.first_layer_index + place,
                operator=index,
                dtype=self.dtype,
                products=self.setup.products,
                device=self.device,
                seed=self.setup.seed,
                slices=self.slices,
                shard=shard,
                sequence=self.sequence,
                experts=self.experts,
                modules=self.setup.modules,
            )
            for index in range(len(layer.graph.operators))
        ]
        local = {name: self.parameters[layer.parameters[name]] for name in layer.parameters}
        return compile_layer(layer.graph, local, contexts, self.recompute, self.backend)

    def bind_sharded_layers(self, sharded: ShardedLayers) -> None:
        """Let layers gather their parameters and reduce their gradients around each of their runs."""
        self._sharded = sharded
        sharded.frozen = self.frozen
        for stretch in self.stretches:
            stretch.sharded = sharded

    def bind_gradients(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Bind the gradient buffers of all later backwards, by global name: shapes of the parameters, contiguous, in
        the computing dtype or in float32. The caller zeroes them. Sharded layers bind their own."""
        sharded_names = self._sharded.names if self._sharded is not None else ()
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in sharded_names:
                buffer = buffers[name]
                assert buffer.shape == parameter.shape, (name, buffer.shape, parameter.shape)
                bind_buffer(parameter, buffer)
        self._bound = True

    def begin_step(self, step: int, divisor: int, weight: float = 1.0) -> None:
        """Start an iteration. `divisor` is the number of counted labels of the whole step, `weight` is the weight of
        this stage's loss among those of several modules."""
        assert not self._records, f"microbatches without their backward: {sorted(self._records)}"
        self.step, self.divisor = step, divisor
        first = self.shard is None or self.shard.position == 0
        wide = torch.promote_types(self.dtype, torch.float32)
        self._seed_gradient = torch.full((), weight / divisor if first else 0.0, dtype=wide, device=self.device)

    def forward(self, microbatch: int, slice_: int, inputs: Tensors, feed: StageInputs) -> Tensors:
        """Run the stage on one slice; return its outputs, detached. Slices of a microbatch come in order."""
        assert slice_ < self.slices, f"slice {slice_} of a stage made for {self.slices}"
        record = self._new_record(microbatch, slice_, inputs, feed, train=True)
        if not self.keeps:
            with torch.no_grad():
                return self._run_layers(record, inputs)
        if self.slices > 1:
            record.past = self._past.setdefault(microbatch, {})
        self._records[microbatch, slice_] = record
        x, wanted = inputs.get(""), self.input_gradient
        for stretch in self.stretches:
            x = stretch.forward(record, x, wanted)
            wanted = stretch.trained
        self._finish_sharded()
        record.masks.clear()
        return self._stage_outputs(record, x)

    def backward(self, microbatch: int, slice_: int, gradients: Tensors) -> Tensors:
        """B: return the input gradients for output `gradients`, and accumulate weight gradients."""
        record = self._records.pop((microbatch, slice_))
        return self._run_back(record, gradients, self.on_layer_gradients)

    def backward_input(self, microbatch: int, slice_: int, gradients: Tensors) -> Tensors:
        """I: as B, but the weight gradients of linear layers wait for `backward_weight`."""
        record = self._records[microbatch, slice_]
        record.deferred = []
        return self._run_back(record, gradients, None)

    def backward_weight(self, microbatch: int, slice_: int) -> None:
        """W: compute the deferred weight gradients, last layer first, releasing each one's tensors at once."""
        record = self._records.pop((microbatch, slice_))
        record.finish_weights(len(self.layers), self.on_layer_gradients, self._sharded)
        self._finish_sharded()

    def abandon_microbatches(self) -> None:
        """Drop microbatches that had no backward, and release their saved tensors."""
        self._records.clear()
        self._past.clear()

    @torch.no_grad()
    def evaluate_slice(self, microbatch: int, slice_: int, inputs: Tensors, feed: StageInputs) -> Tensors:
        """Run forward only, dropout off. Slices of a microbatch come in order, as in training."""
        return self._run_layers(self._new_record(microbatch, slice_, inputs, feed, train=False), inputs)

    def _run_layers(self, record: SavedForward, inputs: Tensors) -> Tensors:
        """Run the layers in order. Only keys and values for later slices are kept, until the last slice."""
        if self.slices > 1:
            record.past = self._past.setdefault(record.microbatch, {})
            if record.slice == self.slices - 1:
                del self._past[record.microbatch]
        x = inputs.get("")
        sharded = self._sharded
        for index, function in enumerate(self.functions):
            if sharded is None:
                x = function.call(record, x)
            else:
                sharded.enter_layer(index, index + 1)
                x = function.call(record, x)
                sharded.leave_layer(index)
        self._finish_sharded()
        return self._stage_outputs(record, x)

    def _finish_sharded(self) -> None:
        if self._sharded is not None:
            self._sharded.finish_action()

    def _new_record(
        self, microbatch: int, slice_: int, inputs: Tensors, feed: StageInputs, train: bool
    ) -> SavedForward:
        record = SavedForward(microbatch, slice_, feed, train)
        record.rows, record.tokens = feed.extent(inputs.get(""))
        if len(inputs) > ("" in inputs):
            record.extras = {name: tensor for name, tensor in inputs.items() if name}
        return record

    def _stage_outputs(self, record: SavedForward, x: torch.Tensor | None) -> Tensors:
        assert x is not None
        outputs = {LOSS if self.functions[-1].returns_loss else "": x.detach()}
        for name in record.extras:
            outputs[LOSS if name == self.side_loss else name] = record.extras[name].detach()
        return outputs

    def _run_back(self, record: SavedForward, gradients: Tensors, done: Callable[[int], None] | None) -> Tensors:
        assert self._bound, "bind_gradients before the first backward"
        seed = self._seed_gradient
        assert seed is not None, "begin_step before the first backward"
        dx = seed if self.functions[-1].returns_loss else gradients[""]
        extra_gradients = {name: value for name, value in gradients.items() if name}
        if self.side_loss:
            extra_gradients[self.side_loss] = seed
        for stretch in reversed(self.stretches):
            dx = stretch.backward(record, dx, extra_gradients, done)
        self._finish_sharded()
        record.cache.clear()
        record.masks.clear()
        record.extras = {}
        if self.slices > 1 and record.slice == 0:
            self._past.pop(record.microbatch, None)
        record.past = None
        result = extra_gradients
        if dx is not None:
            result[""] = dx
        return result
