"""The image generator of a multimodal model by configuration: a small diffusion transformer (Peebles and Xie, 2023)
trained by flow matching (Lipman et al., 2023). Each of its tokens is conditioned on a hidden state of the language
model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """The configuration of one generator."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    latent_size: int
    "Numbers of one latent token, the unit that the model generates (channels x patch x patch)."
    grid_size: int
    "Latent tokens along one side of the table of positions; images of another size are interpolated."
    time_frequencies: int
    layer_norm_eps: float
    initializer_range: float

    def to_config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "latent_size": self.latent_size,
            "grid_size": self.grid_size,
            "time_frequencies": self.time_frequencies,
            "layer_norm_eps": self.layer_norm_eps,
            "initializer_range": self.initializer_range,
        }

    def initial(self, name: str) -> InitialValue:
        """The initial value of a parameter of the generator, by its name within the generator."""
        return InitialValue("zeros") if name.endswith(".bias") else InitialValue("normal", self.initializer_range)


def read(config: Mapping[str, Any], where: str) -> DiffusionConfig:
    """The typed configuration. Raises ModelError."""
    fields = ConfigFields(config, where)
    hidden, heads = fields.width_of_heads(("hidden_size",), ("num_attention_heads",))
    return DiffusionConfig(
        hidden_size=hidden,
        intermediate_size=fields.read_count("intermediate_size", default=4 * hidden),
        num_hidden_layers=fields.read_count("num_hidden_layers"),
        num_attention_heads=heads,
        latent_size=fields.read_count("latent_size"),
        grid_size=fields.read_count("grid_size", default=16),
        time_frequencies=fields.read_count("time_frequencies", default=64),
        layer_norm_eps=fields.read_number("layer_norm_eps", default=1e-6),
        initializer_range=fields.read_number("initializer_range", default=0.02),
    )
