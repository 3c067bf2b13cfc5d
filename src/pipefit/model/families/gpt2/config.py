"""GPT-2 (Radford et al., 2019) by configuration. Its files hold Conv1D weights as (in, out); pipefit's are (out,
in). The projection of queries, keys and values is ordered by heads here, and can be split by them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue, ModelFamily, WeightTensor

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
_HUGGING_FACE_ACTIVATION = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """The configuration of one GPT-2."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int
    activation: str
    layer_norm_epsilon: float
    embd_pdrop: float
    resid_pdrop: float
    tie_word_embeddings: bool
    initializer_range: float
    scale_attention: tuple[bool, bool]
    "Whether scores are divided by sqrt(head dim), and by the layer's number (from 1)."

    def attention_scale(self, layer: int) -> float:
        """The factor of the attention scores of layer `layer`, counted from 0."""
        factor = 1.0 / math.sqrt(self.n_embd // self.n_head) if self.scale_attention[0] else 1.0
        return factor / (layer + 1) if self.scale_attention[1] else factor

    def to_config(self) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.n_positions,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "activation_function": _HUGGING_FACE_ACTIVATION[self.activation],
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "embd_pdrop": self.embd_pdrop,
            "resid_pdrop": self.resid_pdrop,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "scale_attn_weights": self.scale_attention[0],
            "scale_attn_by_inverse_layer_idx": self.scale_attention[1],
        }

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        heads = self.n_head if ".c_attn." in name else 0
        return (WeightTensor(name, transposed=name.endswith(_CONV1D), heads=heads),)

    def initial(self, name: str) -> InitialValue:
        if name.endswith(".bias"):
            return InitialValue("zeros")
        if ".ln_" in name:
            return InitialValue("ones")
        return InitialValue("normal", self.initializer_range)


def read(config: Mapping[str, Any], where: str) -> GPT2Config:
    """The typed configuration of a config.json. Raises ModelError."""
    fields = ConfigFields(config, where)
    width, heads = fields.width_of_heads(("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    if fields.read_number("attn_pdrop", default=0.1) > 0:
        warnings.warn(f"{where}: attn_pdrop is ignored: attention is computed without dropout", stacklevel=2)
    return GPT2Config(
        vocab_size=fields.read_count("vocab_size"),
        n_positions=fields.read_count("n_positions", "max_position_embeddings"),
        n_embd=width,
        n_layer=fields.read_count("n_layer", "num_hidden_layers"),
        n_head=heads,
        n_inner=fields.read_count("n_inner", default=4 * width),
        activation=fields.read_choice("activation_function", default="gelu_new", allowed=ACTIVATIONS),
        layer_norm_epsilon=fields.read_number("layer_norm_epsilon", default=1e-5),
        embd_pdrop=fields.read_number("embd_pdrop", default=0.1),
        resid_pdrop=fields.read_number("resid_pdrop", default=0.1),
        tie_word_embeddings=fields.read_flag("tie_word_embeddings", default=True),
        initializer_range=fields.read_number("initializer_range", default=0.02),
        scale_attention=(
            fields.read_flag("scale_attn_weights", default=True),
            fields.read_flag("scale_attn_by_inverse_layer_idx", default=False),
        ),
    )


FAMILY = ModelFamily(
    name="gpt2",
    model_types=("gpt2",),
    read=read,
    builder="pipefit.model.families.gpt2.layers",
    graphs="pipefit.model.families.gpt2.graphs",
)
FAMILIES = (FAMILY,)
