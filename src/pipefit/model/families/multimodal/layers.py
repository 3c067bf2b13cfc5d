"""A multimodal model as plain layers: the chain vision -> language -> generator, single device.

Modules exchange hidden states in packed rows. The projector's output (1,I,D) is put into the token sequence at
`image_places`; the hidden states at `condition_places` (1,L,D) are taken out of it, in addition to the language model's
loss. Positions are int64, b T + t within the rows of the device. Shape suffixes: B rows, T tokens, D features, V
vocabulary, I image tokens, L latent tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.model.families.common import TokenLoss, constant_vector, name_layer
from pipefit.model.families.decoder import layers as decoder
from pipefit.model.families.decoder.layers import DecoderEmbed, DecoderHead, scale_tensor
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.multimodal import diffusion_layers as diffusion
from pipefit.model.families.multimodal import vision_layers as vision
from pipefit.model.families.multimodal.config import SPACES, MultimodalConfig
from pipefit.model.families.multimodal.packed import PutTokens, TakeTokens
from pipefit.model.graph import TensorSpec as GraphInput


class MultimodalEmbed(DecoderEmbed):
    """x (1,I,D), tokens (B,T) -> (B,T,D): token embeddings, with the image embeddings at their positions. Features for
    the first k layers lie behind them, (1,I,D+k D) and (B,T,D+k D), with zeros at other tokens."""

    def __init__(self, options: DecoderOptions, drops_start: bool) -> None:
        super().__init__(options)
        self.stacked = options.stacked
        self.x_shape = (1, "I", options.hidden_size * (1 + self.stacked))
        self.data_inputs = (GraphInput(name="image_places", shape=(1, "I"), dtype="int64", role="data"),)
        self.put = PutTokens(drops_start)

    def forward(self, x: Tensor, tokens: Tensor, image_places: Tensor) -> Tensor:  # type: ignore[override]
        embedded = self.embedding_norm(scale_tensor(self.embed_tokens(tokens), self.scale))
        if self.stacked:
            zero_111 = constant_vector((0.0,), torch.float32, embedded.device)[None, None].to(embedded.dtype)
            features = embedded.shape[-1] * self.stacked
            embedded = torch.cat((embedded, zero_111.expand(*embedded.shape[:2], features)), dim=-1)
        return self.dropout(self.put(embedded, x, image_places))


class MultimodalHead(DecoderHead):
    """x (B,T,D) -> the conditioning (1,L,D), normalized hidden states at their positions, and the loss, a scalar
    sum."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__(options)
        self.data_inputs = (GraphInput(name="condition_places", shape=(1, "L"), dtype="int64", role="data"),)
        self.take = TakeTokens()
        self.loss = TokenLoss()

    def forward(self, x: Tensor, labels: Tensor, condition_places: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        normed = self.norm(x)
        taken = self.take(normed, condition_places)
        return taken, self.loss(self.cap_logits(self.lm_head(scale_tensor(normed, self.scale))), labels)


def build(config: MultimodalConfig) -> list[nn.Module]:
    """Return the chain of all modules; every layer has its `module_name` and `space`. Frozen parameters need no
    gradient."""
    layers = [*_vision_layers(config), *_language_layers(config), *_generator_layers(config)]
    for layer in layers:
        module = str(layer.layer_name).split(".", 1)[0]
        layer.module_name, layer.space = module, SPACES[module]  # type: ignore[assignment]
        names: dict[str, str] = layer.parameter_names  # type: ignore[assignment]
        for local, parameter in layer.named_parameters():
            parameter.requires_grad_(not config.is_frozen(names[local]))
    return layers


def _vision_layers(config: MultimodalConfig) -> list[nn.Module]:
    if config.vision is None:
        return []
    encoder, width = config.vision, config.language.decoder.hidden_size
    norm = {f"norm.{end}": f"vision.norm.{end}" for end in ("weight", "bias")}
    return [
        name_layer(vision.make_embed(encoder), "vision.embed", "vision.embed."),
        *(
            name_layer(vision.make_block(encoder, i, width), f"vision.layers.{i}", f"vision.layers.{i}.")
            for i in range(encoder.num_hidden_layers)
        ),
        name_layer(
            vision.make_projector(encoder, config.projector, width),
            "vision.projector",
            "vision.projector.",
            norm,
        ),
    ]


def _language_layers(config: MultimodalConfig) -> list[nn.Module]:
    """The layers of the language model; the first and last are replaced if another module is connected there."""
    plain = decoder.build(config.language)
    embed, *blocks, head, loss = plain
    if config.vision is not None:
        placed = MultimodalEmbed(config.language.decoder, config.vision.drops_start)
        placed.embed_tokens = embed.embed_tokens  # type: ignore[assignment]
        placed.embedding_norm = embed.embedding_norm  # type: ignore[assignment]
        embed = name_layer(placed, "embed", "model.")
    if config.generator is None:
        ends = [head, loss]
    else:
        both = MultimodalHead(config.language.decoder)
        both.norm, both.lm_head = head.norm, head.lm_head  # type: ignore[assignment]
        ends = [name_layer(both, "head", "model.", {"lm_head.weight": head.parameter_names["lm_head.weight"]})]  # type: ignore[index]
    layers = [embed, *blocks, *ends]
    for layer in layers:
        layer.layer_name = f"language.{layer.layer_name}"  # type: ignore[assignment]
        names: dict[str, str] = layer.parameter_names  # type: ignore[assignment]
        layer.parameter_names = {local: f"language.{name}" for local, name in names.items()}  # type: ignore[assignment]
    return layers


def _generator_layers(config: MultimodalConfig) -> list[nn.Module]:
    if config.generator is None:
        return []
    generator = config.generator
    return [
        name_layer(
            diffusion.DiffusionEmbed(generator, config.language.decoder.hidden_size),
            "generator.embed",
            "generator.embed.",
        ),
        *(
            name_layer(diffusion.DiffusionBlock(generator), f"generator.layers.{i}", f"generator.layers.{i}.")
            for i in range(generator.num_hidden_layers)
        ),
        name_layer(diffusion.DiffusionOutput(generator), "generator.output", "generator.output."),
    ]
