"""The layers of GPT-2 as operator graphs, without torch: equal to the captured ones of `layers.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.gpt2.config import GPT2Config
from pipefit.model.families.graph_writer import (
    POSITIONS,
    TOKENS,
    GraphWriter,
    WrittenLayer,
    hidden_input,
    model_of_chain,
    write_loss,
)
from pipefit.model.graph import Graph, Model


def write_model(family: str, config: Mapping[str, Any], typed: GPT2Config) -> Model:
    """Return the model of a configuration."""
    output = "transformer.wte.weight" if typed.tie_word_embeddings else "lm_head.weight"
    chain = [
        WrittenLayer("embed", _write_embedding(typed), {}, "transformer."),
        *(
            WrittenLayer(f"layers.{layer}", _write_block(typed, layer), {}, f"transformer.h.{layer}.")
            for layer in range(typed.n_layer)
        ),
        WrittenLayer("head", _write_head(typed), {"lm_head.weight": output}, "transformer."),
        write_loss(typed.vocab_size),
    ]
    return model_of_chain(family, config, chain)


def _write_embedding(config: GPT2Config) -> Graph:
    writer = GraphWriter((TOKENS, POSITIONS))
    writer.declare("wte.weight", config.vocab_size, config.n_embd)
    writer.declare("wpe.weight", config.n_positions, config.n_embd)
    tokens = writer.write("embedding", ("tokens", "wte.weight"), "wte (Embedding)")
    places = writer.write("embedding", ("positions", "wpe.weight"), "wpe (Embedding)")
    x = writer.write("add", (tokens, places), "Embed")
    return writer.finish(writer.apply_dropout(x, config.embd_pdrop, "drop", 0))


def _write_block(config: GPT2Config, layer: int) -> Graph:
    features, heads, size = config.n_embd, config.n_head, config.n_embd // config.n_head
    writer = GraphWriter((hidden_input(features),))
    _declare_norm(writer, "ln_1", features)
    writer.declare_linear("attn.c_attn", features, 3 * features, True)
    writer.declare_linear("attn.c_proj", features, features, True)
    _declare_norm(writer, "ln_2", features)
    writer.declare_linear("mlp.c_fc", features, config.n_inner, True)
    writer.declare_linear("mlp.c_proj", config.n_inner, features, True)
    fused = writer.apply_linear(_apply_norm(writer, config, "x", "ln_1"), "attn.c_attn")
    fused = writer.reshape_to(fused, ("B", "T", heads, 3 * size), "attn (Attention)")
    parts = [writer.slice_last(fused, part * size, (part + 1) * size, "attn (Attention)") for part in range(3)]
    scale = config.attention_scale(layer)
    label = "attn.attention (CausalAttention)"
    out = writer.write("attention", parts, label, causal=True, scale=scale, window=None)
    out = writer.apply_linear(writer.reshape_to(out, ("B", "T", features), "attn (Attention)"), "attn.c_proj")
    x = writer.write("add", ("x", writer.apply_dropout(out, config.resid_pdrop, "attn.resid_dropout", 0)), "Block")
    inner = writer.apply_linear(_apply_norm(writer, config, x, "ln_2"), "mlp.c_fc")
    out = writer.apply_linear(writer.apply_activation(inner, config.activation, "mlp (MLP)"), "mlp.c_proj")
    return writer.finish(
        writer.write("add", (x, writer.apply_dropout(out, config.resid_pdrop, "mlp.dropout", 1)), "Block")
    )


def _write_head(config: GPT2Config) -> Graph:
    writer = GraphWriter((hidden_input(config.n_embd),))
    _declare_norm(writer, "ln_f", config.n_embd)
    writer.declare("lm_head.weight", config.vocab_size, config.n_embd)
    return writer.finish(writer.apply_linear(_apply_norm(writer, config, "x", "ln_f"), "lm_head"))


def _declare_norm(writer: GraphWriter, name: str, features: int) -> None:
    writer.declare(f"{name}.weight", features)
    writer.declare(f"{name}.bias", features)


def _apply_norm(writer: GraphWriter, config: GPT2Config, x: str, name: str) -> str:
    inputs = (x, f"{name}.weight", f"{name}.bias")
    return writer.write("layer_norm", inputs, f"{name} (LayerNorm)", eps=config.layer_norm_epsilon)
