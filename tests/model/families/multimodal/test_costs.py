"""FLOPs and bytes of multimodal layers: against PyTorch's FlopCounterMode, and against what the runtime has alive.

Images are of uneven sizes: attention costs the sum of their squared lengths, whatever the length of the packed row.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from tests.model.analysis.test_saved import DTYPES, StorageWatch
from tests.support.multimodal_reference import Batch, batch_of, make_sample
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipefit.model.analysis.passing import transient_bytes
from pipefit.model.analysis.saved import Recompute, saved_bytes
from pipefit.model.analysis.totals import graph_flops
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Graph, Model
from pipefit.model.ops import Flops
from pipefit.model.ops.packed_attention import SQUARES
from pipefit.model.registry import build_layers, describe_config, resolve_model, typed_config
from pipefit.run.stage.memory_audit import AllocationAudit
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs

LENGTH = 40
IMAGES = [([(2, 3), (4, 4)], [(2, 2)]), ([], [(3, 1), (1, 5)]), ([(1, 1)], [])]


@cache
def made() -> tuple[dict[str, Any], Model]:
    tiny = resolve_model("multimodal-tiny").config
    config = {**tiny, "vision": {**tiny["vision"], "model_type": "vit"}}
    config = describe_config(config, "multimodal", "config").config
    return config, capture_family("multimodal", config)


def batch_in(dtype: torch.dtype) -> Batch:
    typed = typed_config("multimodal", made()[0])
    return batch_of(typed, [make_sample(typed, LENGTH, *each, seed=row) for row, each in enumerate(IMAGES)], dtype)


def symbols_of(batch: Batch, module: str) -> dict[str, int]:
    """B, T, I, L and the squares of a module's graphs for this batch."""
    if module == "language":
        places = {"I": "image_places", "L": "condition_places"}
        return {"B": len(IMAGES), "T": LENGTH, **{s: batch[module][n].shape[1] for s, n in places.items()}}
    lengths = batch[module]["documents"][0].unique_consecutive(return_counts=True)[1]
    return {"B": 1, "T": int(lengths.sum()), SQUARES: int((lengths**2).sum())}


def counted(layer: torch.nn.Module, x: torch.Tensor | None, fed: Any) -> Flops:
    """Forward, input gradient and weight gradient as PyTorch counts them: by freezing one side, then the other."""
    names = list(inspect.signature(layer.forward).parameters)
    given = {name: fed[name] for name in names if name in fed}
    totals = []
    for wanted, trained in ((False, False), (True, False), (True, True)):
        layer.requires_grad_(trained)
        inputs = [] if len(given) == len(names) else [x.detach().requires_grad_(wanted)]
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            found = layer(*inputs, **given)
            total = sum(t.sum() for t in (found if isinstance(found, tuple) else (found,)))
            if total.requires_grad:
                total.backward()
        totals.append(counter.get_total_flops())
    return Flops(totals[0], totals[1] - totals[0], totals[2] - totals[1])


def test_flops_agree_with_the_flop_counter() -> None:
    config, model = made()
    layers = build_layers("multimodal", config, device="cpu")
    batch, x = batch_in(torch.float32), None
    for layer, captured in zip(layers, model.layers, strict=True):
        module = str(layer.module_name)
        found = graph_flops(model.layer_graph(captured), symbols_of(batch, module))
        assert found == counted(layer, x, batch[module]), captured.name
        layer.requires_grad_(False)
        names = list(inspect.signature(layer.forward).parameters)
        fed = {name: batch[module][name] for name in names if name in batch[module]}
        result = layer(**fed) if len(fed) == len(names) else layer(x, **fed)
        x = result[0] if isinstance(result, tuple) else result


def test_attention_within_images_costs_their_squares_and_frozen_layers_no_weight_gradient() -> None:
    model = made()[1]
    graph = model.layer_graph(model.modules[0].layers[1])
    packed, one = (graph_flops(graph, {"B": 1, "T": 30, SQUARES: squares}) for squares in (20 * 20 + 10 * 10, 30 * 30))
    assert one == graph_flops(graph, {"B": 1, "T": 30}), "without squares: one image a row"
    assert one.forward - packed.forward == 2 * 2 * (900 - 500) * 48
    assert one.input_gradient - packed.input_gradient == 2 * (one.forward - packed.forward)
    config = describe_config({**made()[0], "frozen": ["vision"]}, "multimodal", "config").config
    frozen = capture_family("multimodal", config)
    still = graph_flops(frozen.layer_graph(frozen.modules[0].layers[1]), {"B": 1, "T": 30})
    assert still == Flops(one.forward, one.input_gradient, 0) and one.weight_gradient > 0


def stage_of(module: Any, layers: slice, recompute: Recompute, dtype: torch.dtype) -> tuple[StageProgram, list[Graph]]:
    model = made()[1]
    graphs = [model.layer_graph(layer) for layer in module.layers[layers]]
    local = [StageLayer(o.name, g, o.parameters) for o, g in zip(module.layers[layers], graphs, strict=True)]
    side = graphs[-1].loss_output if graphs[-1].loss_output and graphs[-1].hidden_output else ""
    program = StageProgram(local, StageSetup(recompute=recompute, dtype=dtype, side_loss=side))
    for parameter in program.parameters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    wide = torch.promote_types(dtype, torch.float32)
    program.bind_gradients({n: torch.zeros(p.shape, dtype=wide) for n, p in program.parameters.items()})
    program.begin_step(0, 7)
    return program, graphs


def feed_of(fed: Any, dtype: torch.dtype) -> tuple[StageInputs, list[torch.Tensor]]:
    wide = {"time", "target"}
    fed = {n: t.to(torch.promote_types(dtype, torch.float32)) if n in wide else t for n, t in fed.items()}
    everything = list(fed.values())
    roles = {n: fed.pop(n) for n in ("tokens", "labels", "positions", "documents") if n in fed}
    return StageInputs(**roles, data=fed), everything


def input_of(graph: Graph, symbols: dict[str, int], dtype: torch.dtype) -> torch.Tensor | None:
    x = next((tensor for tensor in graph.inputs if tensor.role == "activation"), None)
    return None if x is None else torch.randn([symbols.get(str(size), size) for size in x.shape], dtype=dtype)


@pytest.mark.parametrize(
    ("module", "dtype"), [("vision", "float64"), ("language", "bfloat16"), ("generator", "float64")]
)
def test_saved_bytes_are_the_storages_alive(module: str, dtype: str) -> None:
    place = ["vision", "language", "generator"].index(module)
    batch = batch_in(DTYPES[dtype])
    symbols = symbols_of(batch, module)
    for recompute in ("none", "selective", "full"):
        program, graphs = stage_of(made()[1].modules[place], slice(None), recompute, DTYPES[dtype])
        feed, lasting = feed_of(batch[module], DTYPES[dtype])
        lasting += [t for p in program.parameters.values() for t in (p, p.main_grad)]
        lasting.append(program._seed_gradient)
        expected = [saved_bytes(graph, symbols, DTYPES[dtype].itemsize, recompute) for graph in graphs]
        watch = StorageWatch()
        with watch:
            x = input_of(graphs[0], symbols, DTYPES[dtype])
            out = program.forward(0, 0, {} if x is None else {"": x}, feed)
            del x
        tables = [
            value
            for record in program._records.values()
            for value in torch.utils._pytree.tree_leaves(record.cache)
            if isinstance(value, torch.Tensor)
        ]
        alive = watch.alive([*lasting, *out.values(), *tables])
        assert alive == sum(each.after_forward for each in expected), recompute
        gradients = {"": torch.randn(out[""].shape, dtype=DTYPES[dtype])} if "" in out else {}
        del out, tables
        with watch:
            result = program.backward_input(0, 0, {key: value.clone() for key, value in gradients.items()})
        pending = watch.alive([*lasting, *result.values()])
        assert pending == sum(each.after_input_gradient for each in expected), recompute
        program.backward_weight(0, 0)
        assert watch.alive([*lasting, *result.values()]) == 0


@pytest.mark.parametrize(("module", "layer"), [("vision", 1), ("language", 0), ("language", -1), ("generator", 1)])
def test_the_worst_moment_of_a_layer(module: str, layer: int) -> None:
    """F and B of one layer: the allocator's record against the count. Input and gradient were made outside."""
    place, dtype = ["vision", "language", "generator"].index(module), torch.float32
    modules, batch = made()[1].modules, batch_in(dtype)
    at = range(len(modules[place].layers))[layer]
    symbols = symbols_of(batch, module)
    program, graphs = stage_of(modules[place], slice(at, at + 1), "none", dtype)
    feed, _ = feed_of(batch[module], dtype)
    x = input_of(graphs[0], symbols, dtype)
    assert x is not None
    counted = transient_bytes(graphs[0], symbols, 4, "none", widens=False)
    shape = [symbols.get(str(size), size) for size in graphs[0].find_tensor(graphs[0].outputs[0]).shape]
    dy = {"": torch.randn(shape, dtype=dtype)}
    program.forward(1, 0, {"": x}, feed)  # kernels are tried when they are first used
    program.backward(1, 0, dy)
    with AllocationAudit() as audit:
        audit.mark_phase("F", lambda: program.forward(0, 0, {"": x}, feed) and None)()
        audit.mark_phase("B", lambda: program.backward(0, 0, dy) and None)()
    forward, backward = (usage.peak_bytes for usage in audit.usage)
    small = 4096
    assert forward == pytest.approx(counted.forward - x.nbytes, abs=small)
    assert backward == pytest.approx(counted.fused - x.nbytes * counted.keeps_input - dy[""].nbytes, abs=small)
