"""The Llama family as plain layers: Llama 2 and 3, Mistral, Qwen 2 and 3, Mixtral, Qwen3-MoE, by configuration.

Module names are Hugging Face's, so local parameter names are suffixes of Hugging Face's names. Shape suffixes: B rows,
T tokens, D features, H heads, G key/value heads, K features of a head, F features of the MLP.
"""

from __future__ import annotations

from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS, RMSNorm, TokenLoss, apply_rotary, make_attention, name_layer
from pipefit.model.families.llama.config import LlamaConfig
from pipefit.model.families.llama.moe import MoELayer


class LlamaEmbed(nn.Module):
    """tokens (B,T) -> x (B,T,D)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions; norms on q and k, biases and a window by configuration."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, groups * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, groups * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.attention = make_attention(dim, config.windows[layer])
        self.head_dim = dim
        self.rotary = config.rotary

    def forward(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        q_BTHK = self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTGK = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTHK, k_BTGK = (apply_rotary(t, positions_BT, self.rotary) for t in (q_BTHK, k_BTGK))
        return self.o_proj(self.attention(q_BTHK, k_BTGK, v_BTGK).flatten(-2))


class LlamaMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        features, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(features, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(features, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, features, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class LlamaBlock(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _make_moe(config) if layer in config.sparse_layers else LlamaMLP(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaHead(nn.Module):
    """x (B,T,D) -> logits (B,T,V): the final norm and the output projection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def build(config: LlamaConfig) -> list[nn.Module]:
    """The chain: embed, layers.0 ..., head, loss. Tied embeddings are one nn.Parameter in two layers."""
    embed, head = LlamaEmbed(config), LlamaHead(config)
    if config.tie_word_embeddings:
        head.lm_head.weight = embed.embed_tokens.weight
    output = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return [
        name_layer(embed, "embed", "model."),
        *(
            name_layer(LlamaBlock(config, i), f"layers.{i}", f"model.layers.{i}.")
            for i in range(config.num_hidden_layers)
        ),
        name_layer(head, "head", "model.", {"lm_head.weight": output}),
        name_layer(TokenLoss(), "loss", ""),
    ]


def _make_moe(config: LlamaConfig) -> nn.Module:
    return MoELayer(
        config.hidden_size, config.expert_size, config.experts, config.top_k, config.normalize, config.activation
    )
