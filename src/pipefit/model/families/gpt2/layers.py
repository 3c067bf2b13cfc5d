"""GPT-2 as plain layers. Weights are (out, in) here; Hugging Face's Conv1D files are transposed at load and save.

Embeddings and residual branches have dropout as configured (in training mode); attention probabilities have none. Shape
suffixes: B rows, T tokens, D features, H heads, K features of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS, CausalAttention, TokenLoss, name_layer
from pipefit.model.families.gpt2.config import GPT2Config


class GPT2Embed(nn.Module):
    """tokens, positions (B,T) -> x (B,T,D)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.drop(self.wte(tokens) + self.wpe(positions))


class GPT2Attention(nn.Module):
    """Multi-head causal attention with one projection, whose rows are q, k and v of head 0, then of head 1, ..."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.attention = CausalAttention(config.attention_scale(layer))
        self.heads = config.n_head

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTHK, k_BTHK, v_BTHK = self.c_attn(x_BTD).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        return self.resid_dropout(self.c_proj(self.attention(q_BTHK, k_BTHK, v_BTHK).flatten(-2)))


class GPT2MLP(nn.Module):
    """c_proj(activation(c_fc(x)))."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.activation = config.activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x_BTD))))


class GPT2Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2Head(nn.Module):
    """x (B,T,D) -> logits (B,T,V)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(x))


def build(config: GPT2Config) -> list[nn.Module]:
    """The chain: embed, layers.0 ..., head, loss."""
    embed, head = GPT2Embed(config), GPT2Head(config)
    if config.tie_word_embeddings:
        head.lm_head.weight = embed.wte.weight
    output = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    return [
        name_layer(embed, "embed", "transformer."),
        *(name_layer(GPT2Block(config, i), f"layers.{i}", f"transformer.h.{i}.") for i in range(config.n_layer)),
        name_layer(head, "head", "transformer.", {"lm_head.weight": output}),
        name_layer(TokenLoss(), "loss", ""),
    ]
