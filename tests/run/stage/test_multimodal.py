"""The modules of a multimodal model as stage programs, whole and over a shard axis, against plain PyTorch.

Losses and every gradient, float64, 1e-10: recomputation and split backward; Megatron's programs over two uneven gloo
processes, with and without sequence parallelism, the seams between the modules among them; microbatches without images.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from tests.run.sharded.test_megatron import assemble, part
from tests.support.multimodal_reference import batch_of, divisors_of, make_sample, step
from tests.support.processes import run_processes

from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import build_layers, describe_config, resolve_model, typed_config
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs
from pipefit.shard.megatron import shard_program

EXACT = 1e-10
ROLES = ("tokens", "labels", "positions", "documents")


@cache
def captured():
    """(configuration, captured model): a small ViT, language model and generator."""
    tiny = resolve_model("multimodal-tiny").config
    language = {**tiny["language"], "num_hidden_layers": 1}
    config = {**tiny, "vision": {**tiny["vision"], "model_type": "vit"}, "language": language}
    config = describe_config(config, "multimodal", "config").config
    return config, capture_family("multimodal", config)


def prepared(config, images):
    """(typed configuration, layers, batch); parameters are random numbers, the same in every process."""
    layers = build_layers("multimodal", config, device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2 + 0.05
    typed = typed_config("multimodal", config)
    samples = [make_sample(typed, 40, seen, drawn, seed=row) for row, (seen, drawn) in enumerate(images)]
    return typed, layers, batch_of(typed, samples)


def feed_of(fed):
    fed = dict(fed)
    starts = fed["documents"][0].unique_consecutive(return_counts=True)[1] if "documents" in fed else torch.zeros(0)
    lengths = tuple(starts.int().tolist()) if "documents" in fed else None
    return StageInputs(**{name: fed.pop(name) for name in ROLES if name in fed}, data=fed, image_lengths=lengths)


def run_modules(stages, batch, divisors, weights, mode):
    """(losses, programs): a step of one microbatch. `stages`: (module, program) in order."""
    losses, x = {}, {}
    for module, program in stages:
        program.begin_step(0, divisors.get(module, 1), weights.get(module, 1.0))
        outputs = program.forward(0, 0, x, feed_of(batch[module]))
        if "loss" in outputs:
            losses[module] = outputs["loss"]
        x = {"": outputs[""].clone()} if "" in outputs else {}
    back = {}
    for _, program in reversed(stages):
        if mode == "B":
            back = program.backward(0, 0, back)
        else:
            back = program.backward_input(0, 0, back)
            program.backward_weight(0, 0)
    return losses


def compare(found, wanted):
    """Keys' biases have no gradient but rounding: scores move all alike."""
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        bound = 1e-13 * largest if name.endswith("k_proj.bias") else EXACT * float(gradient.abs().max())
        assert (found[name] - gradient).abs().max() <= bound, name


def check(group, rank, config, model, cases):
    """Every case (images, shares, sequence parallel, recompute, mode) on this rank."""
    for images, shares, sequence_parallel, recompute, mode in cases:
        typed, layers, batch = prepared(config, images)
        wanted = step(layers, batch, typed.loss_weights)
        values = {layer.parameter_names[n]: p.detach() for layer in layers for n, p in layer.named_parameters()}
        shard = None if group is None else ShardContext(group=group, shares=shares, position=rank)
        stages, places = [], {}
        for module in model.modules:
            graphs = [model.layer_graph(layer) for layer in module.layers]
            if shard is not None:
                sharded = [shard_program(graph, shares, sequence_parallel) for graph in graphs]
                graphs = [each.graphs[rank] for each in sharded]
                for layer, each in zip(module.layers, sharded, strict=True):
                    for name, form in each.parameter_forms.items():
                        sizes = (
                            [g.find_parameter(name).shape[form.dim] for g in each.graphs] if form.kind == "G" else []
                        )
                        places[layer.parameters[name]] = (form, [0, *itertools.accumulate(sizes)])
            local = [StageLayer(o.name, graph, o.parameters) for o, graph in zip(module.layers, graphs, strict=True)]
            last = graphs[-1]
            side = last.loss_output if last.loss_output and last.hidden_output else ""
            program = StageProgram(
                local, StageSetup(recompute=recompute, dtype=torch.float64, shard=shard, side_loss=side)
            )
            for name, parameter in program.parameters.items():
                value = values[name]
                parameter.data.copy_(value if shard is None else part(value, *places[name], rank))
            program.bind_gradients({name: torch.zeros_like(p.data) for name, p in program.parameters.items()})
            stages.append((module.name, program))
        losses = run_modules(stages, batch, divisors_of(batch), typed.loss_weights, mode)
        for name, loss in wanted.losses.items():
            assert torch.allclose(losses[name], loss, rtol=EXACT), (name, sequence_parallel)
        found = {name: p.main_grad for _, program in stages for name, p in program.parameters.items()}
        if shard is not None:
            found = {n: assemble(g, *places[n], values[n], group, rank) for n, g in found.items()}
        compare(found, wanted.gradients)
    return len(cases)


MIXED = [([(2, 3), (4, 4)], [(2, 2)]), ([], [(3, 1)]), ([(1, 1)], [])]
EMPTY = [([], []), ([], [])]


def test_modules_of_one_device():
    ways = [(MIXED, "none", "B"), (MIXED, "selective", "IW"), (MIXED, "full", "IW"), (EMPTY, "none", "IW")]
    check(None, 0, *captured(), [(images, (), False, recompute, mode) for images, recompute, mode in ways])


@pytest.mark.gloo
def test_modules_over_uneven_shards():
    ways = [(MIXED, False, "none", "B"), (MIXED, True, "selective", "IW"), (EMPTY, True, "none", "B")]
    cases = [(images, (2, 1), sp, recompute, mode) for images, sp, recompute, mode in ways]
    assert run_processes(check, 2, *captured(), cases) == [len(cases)] * 2


def encoder_step(config, model, recompute, input_gradient):
    """(calls of every layer, pieces kept by the forward, gradients, what goes back, places announced) of a step of the
    encoder's stage."""
    _, layers, batch = prepared(config, MIXED)
    values = {layer.parameter_names[n]: p.detach() for layer in layers for n, p in layer.named_parameters()}
    (module,) = (one for one in model.modules if one.name == "vision")
    local = [StageLayer(one.name, model.layer_graph(one), one.parameters) for one in module.layers]
    program = StageProgram(local, StageSetup(recompute=recompute, dtype=torch.float64, input_gradient=input_gradient))
    for name, parameter in program.parameters.items():
        parameter.data.copy_(values[name])
    gradients = {name: torch.zeros_like(p.data) for name, p in program.parameters.items() if p.requires_grad}
    program.bind_gradients(gradients)
    calls, announced = [0] * len(local), []

    def counted(call, place):
        def count(*given):
            calls[place] += 1
            return call(*given)

        return count

    for stretch in program.stretches:
        stretch.calls = [counted(call, stretch.first + at) for at, call in enumerate(stretch.calls)]
    program.begin_step(0, 1)
    program.on_layer_gradients = announced.append
    out = program.forward(0, 0, {}, feed_of(batch["vision"]))
    kept = len(program._records[0, 0].pieces)
    back = program.backward(0, 0, {name: torch.ones_like(value) for name, value in out.items()})
    return calls, kept, gradients, back, announced


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_before_all_that_is_trained_are_neither_kept_nor_run_again(recompute) -> None:
    config, _ = captured()
    model = capture_family("multimodal", {**config, "frozen": ["vision.encoder"]})
    _, _, wanted, _, _ = encoder_step(config, captured()[1], "none", True)
    calls, kept, gradients, back, announced = encoder_step(config, model, recompute, False)
    assert calls[:-1] == [1] * (len(calls) - 1) and kept == 1 and not back
    assert announced == [*reversed(range(len(calls)))]
    assert gradients and set(gradients) < set(wanted)
    compare(gradients, {name: wanted[name] for name in gradients})
