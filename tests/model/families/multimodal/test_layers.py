"""Multimodal models: the captured modules against the plain layers on one device, in float64.

The plain layers of the image encoder are held to `transformers` in `test_vision_layers.py`, those of the generator
to the papers here, image by image.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.interpreter import run_outputs
from tests.support.multimodal_reference import Batch, Sample, batch_of, divisors_of, grid_of, make_sample, step, step_of

from pipefit.errors import ModelError
from pipefit.model.analysis.totals import infer_shapes
from pipefit.model.capture.layers import capture_family, capture_layers
from pipefit.model.graph import Model
from pipefit.model.ops import KINDS
from pipefit.model.registry import build_layers, describe_config, open_model, resolve_model, save_model, typed_config
from pipefit.plan.request.sliceable import document_obstacles, slicing_obstacles

TINY = resolve_model("multimodal-tiny").config


def changed(**fields: Any) -> dict[str, Any]:
    return describe_config({**TINY, **fields}, "multimodal", "config").config


@cache
def _model(key: str) -> Model:
    return capture_family("multimodal", CONFIGS[key])


CONFIGS = {
    "all": TINY,
    "vit": changed(vision={**TINY["vision"], "model_type": "vit", "image_mean": [0.4, 0.5, 0.6]}),
    "no generator": changed(generator=None, loss_weights={}, frozen=["vision.encoder", "language"]),
    "no vision": changed(vision=None, frozen=["language"]),
}


def samples_of(config: Any, images: list[list[tuple[int, int]]], drawn: list[list[tuple[int, int]]]) -> list[Sample]:
    drawn = drawn if config.generator is not None else [[]] * len(images)
    images = images if config.vision is not None else [[]] * len(images)
    return [make_sample(config, 40, *pair, seed=row) for row, pair in enumerate(zip(images, drawn, strict=True))]


def filled(config: dict[str, Any]) -> list[torch.nn.Module]:
    """The layers in float64 with random numbers in all parameters, biases and norms among them."""
    layers = build_layers("multimodal", config, device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            if parameter.dim() == 1:
                parameter.data += 0.5
    return layers


def run_graphs(model: Model, layers: list[torch.nn.Module], batch: Batch) -> dict[str, torch.Tensor]:
    """The losses of the modules by the interpreter of graphs, with the parameters of the layers."""
    by_name = {layer.layer_name: dict(layer.named_parameters()) for layer in layers}
    losses, x = {}, None
    for module in model.modules:
        for layer in module.layers:
            graph, fed = model.layer_graph(layer), batch[module.name]
            inputs = {t.name: x if t.role == "activation" else fed[t.name] for t in graph.inputs}
            outputs = dict(zip(graph.outputs, run_outputs(graph, inputs, by_name[layer.name]), strict=True))
            if graph.loss_output:
                losses[module.name] = outputs[graph.loss_output]
            if graph.hidden_output:
                x = outputs[graph.hidden_output]
    return losses


def agree(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """To 1e-11 of a tensor's largest entry. The biases of keys have none: scores move all alike, and what comes out as
    their gradient is rounding."""
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        bound = 1e-14 * largest if name.endswith("k_proj.bias") else 1e-11 * float(gradient.abs().max())
        assert (found[name] - gradient).abs().max() <= bound, name


def compare(key: str, batch: Batch, layers: list[torch.nn.Module]) -> None:
    config = typed_config("multimodal", CONFIGS[key])
    wanted = step(layers, batch, config.loss_weights)
    found = step_of(layers, run_graphs(_model(key), layers, batch), wanted.divisors, config.loss_weights)
    assert found.losses.keys() == wanted.losses.keys() and found.gradients.keys() == wanted.gradients.keys()
    for name, loss in wanted.losses.items():
        assert torch.allclose(found.losses[name], loss, rtol=1e-12), name
    agree(found.gradients, wanted.gradients)


IMAGES = [[(2, 3), (4, 4)], [], [(1, 1)], [(3, 2), (1, 4), (2, 2)]]
DRAWN = [[(2, 2)], [(3, 1), (2, 4)], [], []]


@pytest.mark.parametrize("key", CONFIGS)
def test_captured_modules_give_the_losses_and_gradients_of_the_plain_layers(key: str) -> None:
    config, layers = typed_config("multimodal", CONFIGS[key]), filled(CONFIGS[key])
    batch = batch_of(config, samples_of(config, IMAGES, DRAWN))
    compare(key, batch, layers)


@pytest.mark.parametrize("key", ["all", "vit"])
def test_a_batch_without_images_gives_zero_gradients_and_no_loss_of_the_generator(key: str) -> None:
    config, layers = typed_config("multimodal", CONFIGS[key]), filled(CONFIGS[key])
    batch = batch_of(config, samples_of(config, [[], []], [[], []]))
    assert batch["vision"]["pixels"].shape[1] == batch["generator"]["time"].shape[1] == 0
    compare(key, batch, layers)


Image = tuple[tuple[int, int], float, torch.Tensor, torch.Tensor, torch.Tensor]
"""(rows, columns), the time, the hidden states that condition it, the data, the noise; one row a latent token."""


def error_of_one_image(config: Any, p: Mapping[str, torch.Tensor], image: Image) -> torch.Tensor:
    """The squared error of the velocity, written out from the papers: DiT's blocks (Peebles and Xie, 2023) with gates
    of 1 + what is learned; straight paths from noise to data (Lipman et al., 2023, optimal transport, sigma_min 0)."""
    (rows, columns), time, hidden_ND, data_NC, noise_NC = image
    rates = 1000 * 10000 ** (-torch.arange(config.time_frequencies, dtype=torch.float64) / config.time_frequencies)
    features = torch.cat(((time * rates).cos(), (time * rates).sin()))

    def path(t: float) -> torch.Tensor:
        return (1 - t) * noise_NC + t * data_NC

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ p[f"generator.{name}.weight"].T + p[f"generator.{name}.bias"]

    def modulated(name: str, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        normal = (x - mean) / (variance + config.layer_norm_eps).sqrt()
        return (1 + linear(f"{name}.scale", features)) * normal + linear(f"{name}.shift", features)

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(f"{name}.{which}_proj", x).view(len(x), config.num_attention_heads, -1).transpose(0, 1)
            for which in "qkv"
        )
        seen = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return linear(f"{name}.o_proj", seen.transpose(0, 1).flatten(1))

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        h = linear(f"{name}.fc1", x)
        return linear(f"{name}.fc2", h / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3))))

    square = p["generator.embed.positions.table"].T.view(1, -1, config.grid_size, config.grid_size)
    positions = torch.nn.functional.interpolate(square, size=(rows, columns), mode="bicubic")[0].flatten(1).T
    x = linear("embed.condition", hidden_ND) + linear("embed.latent", path(time)) + positions
    for layer in (f"layers.{i}" for i in range(config.num_hidden_layers)):
        for number, part in ((1, attention), (2, mlp)):
            modulation, branch = f"{layer}.modulation{number}", f"{layer}.{part.__name__}"
            x = x + (1 + linear(f"{modulation}.gate", features)) * part(branch, modulated(modulation, x))
    velocity = linear("output.output", modulated("output", x))
    return (velocity - (path(1) - path(0))).square().sum()


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_generator_is_the_papers_transformer_of_each_image(blocks: int) -> None:
    """Images of several sizes in one packed row, a time each, against every one alone: loss and all gradients."""
    described = changed(generator={**TINY["generator"], "num_hidden_layers": blocks}, frozen=[])
    config: Any = typed_config("multimodal", described)
    layers = [layer for layer in filled(described) if layer.module_name == "generator"]
    draw, images = torch.Generator().manual_seed(2), []
    for size, time in (((2, 3), 0.15), ((config.generator.grid_size,) * 2, 0.8), ((5, 1), 0.55)):
        widths = (config.language.decoder.hidden_size, config.generator.latent_size, config.generator.latent_size)
        numbers = [torch.randn(size[0] * size[1], w, generator=draw, dtype=torch.float64) for w in widths]
        images.append((size, time, numbers[0].requires_grad_(), *numbers[1:]))
    names = {layer.parameter_names[local]: p for layer in layers for local, p in layer.named_parameters()}
    wanted = sum(error_of_one_image(config.generator, names, image) for image in images)

    lengths = torch.tensor([len(image[2]) for image in images])
    times = torch.tensor([image[1] for image in images], dtype=torch.float64)
    fed = {
        "noisy": torch.cat([(1 - time) * noise + time * data for _, time, _, data, noise in images]),
        "target": torch.cat([data - noise for *_, data, noise in images]),
        "time": times.repeat_interleave(lengths),
        "grid": torch.cat([grid_of(*image[0]) for image in images]),
        "documents": (lengths.cumsum(0) - lengths).repeat_interleave(lengths),
    }
    row = {name: x.unsqueeze(0) for name, x in fed.items()}
    embed, *inner, output = layers
    x = embed(torch.cat([image[2] for image in images]).unsqueeze(0), row["noisy"], row["grid"])
    for block in inner:
        x = block(x, row["documents"], row["time"])
    found = output(x, row["time"], row["target"])

    inputs = {**names, **{f"condition of {image[0]}": image[2] for image in images}}
    gradients = [
        dict(zip(inputs, torch.autograd.grad(loss, [*inputs.values()]), strict=True)) for loss in (found, wanted)
    ]
    assert len(inner) == blocks and torch.allclose(found, wanted, rtol=1e-12)
    agree(*gradients)


@pytest.mark.parametrize("seed", range(3))
def test_samples_together_are_samples_one_by_one(seed: int) -> None:
    """Losses and gradients are sums over samples, however many images each has, of whatever sizes: packing mixes no
    two images. Counts and sizes are drawn; some samples have none."""
    config, layers = typed_config("multimodal", CONFIGS["vit"]), filled(CONFIGS["vit"])
    draw = random.Random(seed)
    images = [
        [[(draw.randint(1, 4), draw.randint(1, 3)) for _ in range(draw.randint(0, 2))] for _ in range(4)]
        for _ in range(2)
    ]
    samples = [make_sample(config, 64, *pair, seed=row) for row, pair in enumerate(zip(*images, strict=True))]
    together = step(layers, batch_of(config, samples), config.loss_weights)
    total: dict[str, torch.Tensor] = {}
    losses: dict[str, torch.Tensor] = {}
    for sample in samples:
        batch = batch_of(config, [sample])
        divisors = divisors_of(batch)
        weights = {m: w * divisors[m] / together.divisors[m] for m, w in config.loss_weights.items()}
        one = step(layers, batch, weights)
        for name, gradient in one.gradients.items():
            total[name] = total.get(name, 0) + gradient
        for name, loss in one.losses.items():
            losses[name] = losses.get(name, 0) + loss
    assert all(torch.allclose(losses[name], loss, rtol=1e-12) for name, loss in together.losses.items())
    agree(total, together.gradients)


def test_frozen_parts_are_not_trainable_and_the_rest_is() -> None:
    trainable = {
        key: {
            layer.parameters[spec.name].split(".")[0] + "." + layer.parameters[spec.name].split(".")[1]
            for layer in _model(key).layers
            for spec in _model(key).layer_graph(layer).parameters
            if spec.trainable
        }
        for key in ("no generator", "no vision")
    }
    assert trainable["no generator"] == {"vision.projector"}
    assert trainable["no vision"] == {"generator.embed", "generator.layers", "generator.output"}


def test_modules_live_in_their_spaces_and_meet_in_packed_rows() -> None:
    model = _model("all")
    assert [(module.name, module.space) for module in model.modules] == [
        ("vision", "patches"),
        ("language", "samples"),
        ("generator", "latents"),
    ]
    first, last = (model.layer_graph(model.modules[1].layers[i]) for i in (0, -1))
    assert first.find_tensor("x").shape == (1, "I", 64)
    assert last.hidden_output is not None and last.find_tensor(last.hidden_output).shape == (1, "L", 64)
    assert last.loss_output is not None and last.hidden_output != last.loss_output
    ends = [model.layer_graph(module.layers[-1]) for module in model.modules]
    assert [graph.loss_output is None for graph in ends] == [True, False, False]
    assert ends[-1].hidden_output is None


BAD = {
    "a multimodal model needs a language model": {"language": None},
    "an image encoder or an image generator": {"vision": None, "generator": None},
    "the field 'vision' of the configuration(.|\n)*an object": {"vision": "vit"},
    "config, vision(.|\n)*'clip'(.|\n)*vit, siglip_vision_model": {"vision": {**TINY["vision"], "model_type": "clip"}},
    "'image_std'(.|\n)*config, vision(.|\n)*3 numbers above zero": {
        "vision": {**TINY["vision"], "image_std": [0, 1, 1]}
    },
    "smaller than a patch(.|\n)*image_size 8, patch_size 16": {"vision": {**TINY["vision"], "image_size": 8}},
    "type of the language model is not known(.|\n)*'bert'(.|\n)*llama": {
        "language": {**TINY["language"], "model_type": "bert"}
    },
    "no multiple of the attention heads(.|\n)*config, generator": {
        "generator": {**TINY["generator"], "num_attention_heads": 5}
    },
    "'frozen'(.|\n)*'encoder'(.|\n)*vision.projector": {"frozen": ["encoder"]},
    "every module is frozen": {"frozen": ["vision", "language", "generator"]},
    "every module is frozen(.|\n)*vision.encoder(.|\n)*vision.projector": {
        "frozen": ["vision.encoder", "vision.projector", "language", "generator"]
    },
    "'loss_weights'(.|\n)*'vision'(.|\n)*language and generator": {"loss_weights": {"vision": 1.0}},
    "'loss_weights'(.|\n)*not all zero": {"loss_weights": {"language": 0, "generator": 0}},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_configuration_is_one_clear_error(message: str) -> None:
    with pytest.raises(ModelError, match=f"(?i){message}"):
        describe_config({**TINY, **BAD[message]}, "multimodal", "config")


def test_every_module_starts_with_its_own_deviation() -> None:
    """As `pipefit train` starts: from the seed alone, whatever the layout."""
    from pipefit.model.families import InitialValue
    from pipefit.run.stage.initial_values import family_initials, parameter_deviation, parameter_kinds

    model = capture_family("multimodal", changed(vision={**TINY["vision"], "initializer_range": 0.5}))
    kinds, initials = parameter_kinds(model), family_initials(model)
    assert kinds["vision.layers.0.norm1.weight"] == kinds["vision.norm.weight"] == "ones"
    assert kinds["generator.layers.0.modulation1.gate.bias"] == kinds["vision.embed.patch.bias"] == "zeros"
    assert kinds["vision.embed.positions.table"] == kinds["language.lm_head.weight"] == "normal"
    assert parameter_deviation(model, "vision.layers.0.mlp.fc1.weight") == 0.5
    assert parameter_deviation(model, "generator.embed.latent.weight") == 0.02
    for name, kind in kinds.items():  # the configuration says the same as the roles in the graphs
        std = parameter_deviation(model, name) if kind == "normal" else 0.0
        assert initials[name] == InitialValue(kind, std), name


@pytest.mark.parametrize(("name", "language"), [("mllm-9b", 6.738), ("mllm-72b", 70.554)])
def test_models_of_the_papers_sizes(name: str, language: float) -> None:
    """DistTrain's MLLMs: ViT-Huge (0.63 billion parameters beside its projector), a Llama, one billion to generate."""
    described = resolve_model(name)
    layers = build_layers("multimodal", described.config)
    billions: dict[str, float] = {}
    for layer in layers:
        own = sum(parameter.numel() for parameter in layer.parameters())
        part = "projector" if layer.layer_name == "vision.projector" else str(layer.module_name)
        billions[part] = billions.get(part, 0.0) + own / 1e9
    assert billions["vision"] == pytest.approx(0.632, abs=0.003)
    assert billions["language"] == pytest.approx(language, abs=0.001)
    assert billions["generator"] == pytest.approx(1.0, abs=0.03)


def test_shapes_are_inferred_and_no_size_of_the_example_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("vit")
    for graph in model.graphs.values():
        shapes = {tensor.name: tensor.shape for tensor in (*graph.inputs, *graph.parameters, *graph.tensors)}
        for operator in graph.operators:
            kind = KINDS[operator.kind]
            kind.check_inputs(operator)
            given = tuple(shapes[key] if key else None for key in operator.inputs)
            assert infer_shapes(operator.kind, given, operator.attributes) == (shapes[operator.outputs[0]],), operator
    monkeypatch.setattr("pipefit.model.capture.layers._EXAMPLE", {"B": 17, "T": 29, "I": 19, "L": 23})
    assert capture_family("multimodal", CONFIGS["vit"]) == model


def test_a_saved_model_reloads_equal(tmp_path: Path) -> None:
    model = _model("all")
    save_model(model, tmp_path / "model.json")
    again = open_model(str(tmp_path / "model.json"))
    assert again == model and again.hash == model.hash


class OfModule(torch.nn.Module):
    """A user's layer that says which module it belongs to."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module_name, self.space = module, f"rows of {module}"
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_layers_of_a_user_form_modules_and_each_in_one_run() -> None:
    model = capture_layers([OfModule("a"), OfModule("a"), OfModule("b")], x_features=6)
    assert [(m.name, m.space, len(m.layers)) for m in model.modules] == [("a", "rows of a", 2), ("b", "rows of b", 1)]
    with pytest.raises(ModelError, match=r"do not follow each other(.|\n)*'a' again, behind 'b'(.|\n)*one run"):
        capture_layers([OfModule("a"), OfModule("b"), OfModule("a")], x_features=6)


def test_documents_are_kept_apart_in_sequences_that_are_not_cut() -> None:
    """Several samples in one row: masks reach every mixing of tokens. In slices places would count from elsewhere."""
    for key in ("all", "no vision"):
        assert [*document_obstacles(_model(key))] == []
        (error,) = slicing_obstacles(_model(key))
        assert (
            "several modules" in error.full_text()
            and "language" in error.full_text()
            and "one slice" in error.full_text()
        )
