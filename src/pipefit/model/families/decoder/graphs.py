"""The layers of a decoder as operator graphs, without torch: equal to the captured ones of `layers.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions
from pipefit.model.families.decoder.slopes import alibi_slopes
from pipefit.model.families.decoder.stored_names import OUTPUT_TABLE, TOKEN_TABLE, block_parameter_name
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


def write_model(family: str, config: Mapping[str, Any], typed: Any) -> Model:
    """Return the model of a configuration with `decoder` options."""
    options: DecoderOptions = typed.decoder
    output = TOKEN_TABLE if options.tied else OUTPUT_TABLE
    blocks = [_DecoderWriter(options, layer) for layer in range(options.layers)]
    chain = [
        WrittenLayer("embed", _write_embedding(options), {}, "model."),
        *(
            WrittenLayer(f"layers.{layer}", block.write_block(), block.global_names())
            for layer, block in enumerate(blocks)
        ),
        WrittenLayer("head", _write_head(options), {"lm_head.weight": output}, "model."),
        write_loss(options.vocab_size),
    ]
    return model_of_chain(family, config, chain)


def declare_norm(writer: GraphWriter, options: DecoderOptions, name: str, size: int = 0) -> None:
    """Add the parameters of a norm over `size` features, or over those of the hidden state."""
    size = size or options.hidden_size
    writer.declare(f"{name}.weight", size)
    if options.norm.kind == "layer" and options.norm.bias:
        writer.declare(f"{name}.bias", size)


def apply_norm(writer: GraphWriter, options: DecoderOptions, x: str, name: str) -> str:
    """Write a norm with the parameters of that name; x itself if there are none."""
    weight, norm = writer.known_parameter(f"{name}.weight"), options.norm
    if not weight:
        return x
    if norm.kind == "layer":
        inputs = (x, weight, writer.known_parameter(f"{name}.bias"))
        return writer.write("layer_norm", inputs, f"{name} (LayerNorm)", eps=norm.eps)
    if norm.offset:
        return writer.write("rms_norm", (x, weight), f"{name} (OffsetRMSNorm)", eps=norm.eps, offset=norm.offset)
    return writer.write("rms_norm", (x, weight), f"{name} (RMSNorm)", eps=norm.eps)


def scale_value(writer: GraphWriter, x: str, factor: float, source: str) -> str:
    """Write a multiplication by a number, unless it is 1."""
    return x if factor == 1.0 else writer.write("mul", (x, ""), source, scalar=factor)


def _write_embedding(options: DecoderOptions) -> Graph:
    positions = bool(options.position_rows)
    writer = GraphWriter((TOKENS, POSITIONS) if positions else (TOKENS,))
    source = "PositionEmbed" if positions else "Embed"
    writer.declare("embed_tokens.weight", options.vocab_size, options.hidden_size)
    if options.embedding_norm:
        declare_norm(writer, options, "embedding_norm")
    if positions:
        writer.declare("embed_positions.weight", options.position_rows, options.hidden_size)
    offset = options.position_offset if positions else 0
    places = writer.write("add", ("positions", ""), source, scalar=offset) if offset else "positions"
    padding = {} if options.padding is None else {"padding": options.padding}
    x = writer.write("embedding", ("tokens", "embed_tokens.weight"), "embed_tokens (Embedding)", **padding)
    x = scale_value(writer, x, options.embedding_scale, source)
    if positions:
        learned = writer.write("embedding", (places, "embed_positions.weight"), "embed_positions (Embedding)")
        x = writer.write("add", (x, learned), source)
    x = apply_norm(writer, options, x, "embedding_norm")
    return writer.finish(writer.apply_dropout(x, options.embedding_dropout, "dropout", 0))


def _write_head(options: DecoderOptions) -> Graph:
    writer = GraphWriter((hidden_input(options.hidden_size),))
    declare_norm(writer, options, "norm")
    writer.declare("lm_head.weight", options.vocab_size, options.hidden_size)
    x = scale_value(writer, apply_norm(writer, options, "x", "norm"), options.logit_scale, "Head")
    x = writer.apply_linear(x, "lm_head")
    if options.logit_softcap:
        x = writer.write("div", (x, ""), "Head", scalar=options.logit_softcap)
        x = writer.write("tanh", (x,), "Head")
        x = writer.write("mul", (x, ""), "Head", scalar=options.logit_softcap)
    return writer.finish(x)


@dataclass(slots=True)
class _DecoderWriter:
    """Writes one block of a decoder."""

    options: DecoderOptions
    layer: int
    writer: GraphWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = GraphWriter((hidden_input(self.options.hidden_size), POSITIONS))

    @property
    def experts(self) -> ExpertOptions | None:
        """The mixture of experts of this layer, if it has one."""
        experts = self.options.experts
        return experts if experts is not None and self.layer in experts.layers else None

    def global_names(self) -> dict[str, str]:
        """Return the global names of the parameters."""
        return {name: block_parameter_name(self.layer, name) for name in self.writer.parameters}

    def write_block(self) -> Graph:
        """Return the graph of the block."""
        options, writer = self.options, self.writer
        before, after = options.norm_places != "after", options.norm_places != "before"
        shared_norm = not before or (options.parallel and options.parallel_norms == 1)
        if before:
            declare_norm(writer, options, "input_layernorm")
        (self._declare_latent if options.latent else self._declare_attention)()
        if not shared_norm:
            declare_norm(writer, options, "post_attention_layernorm")
        self._declare_mlp()
        for name in ("attention_output_norm", "mlp_output_norm") if after else ():
            declare_norm(writer, options, name)
        normed = apply_norm(writer, options, "x", "input_layernorm")
        attended = self._apply_latent(normed) if options.latent else self._apply_attention(normed)
        attended = self._finish_branch(attended, "attention_output_norm", 0)
        if options.parallel:
            inner = normed if shared_norm else apply_norm(writer, options, "x", "post_attention_layernorm")
            branch = self._finish_branch(self._apply_mlp(inner), "mlp_output_norm", 1)
            return writer.finish(writer.write("add", ("x", writer.write("add", (attended, branch), "Block")), "Block"))
        x = writer.write("add", ("x", attended), "Block")
        inner = apply_norm(writer, options, x, "post_attention_layernorm")
        branch = self._finish_branch(self._apply_mlp(inner), "mlp_output_norm", 1)
        return writer.finish(writer.write("add", (x, branch), "Block"))

    def _finish_branch(self, branch: str, norm: str, index: int) -> str:
        branch = apply_norm(self.writer, self.options, branch, norm)
        branch = scale_value(self.writer, branch, self.options.residual_scale, "Block")
        return self.writer.apply_dropout(branch, self.options.residual_dropout, "dropout", index)

    # Attention.

    def _declare_attention(self) -> None:
        options, writer, dim = self.options, self.writer, self.options.head_dim
        for name, heads in (("q", options.heads), ("k", options.groups), ("v", options.groups)):
            writer.declare_linear(f"self_attn.{name}_proj", options.hidden_size, heads * dim, options.qkv_bias)
        writer.declare_linear("self_attn.o_proj", options.heads * dim, options.hidden_size, options.output_bias)
        for name, heads in (("q_norm", options.heads), ("k_norm", options.groups)):
            if options.qk_norm == "each_head":
                writer.declare(f"self_attn.{name}.weight", heads, dim)
            elif options.qk_norm != "none":
                size = dim * (heads if options.qk_norm == "projection" else 1)
                declare_norm(writer, options, f"self_attn.{name}", size)
        self._declare_sinks()

    def _declare_sinks(self) -> None:
        if self.options.sinks:
            self.writer.declare("self_attn.attention.sinks", self.options.heads)

    def _apply_attention(self, x: str) -> str:
        options, writer, source = self.options, self.writer, "self_attn (Attention)"
        q, k = (self._split_heads(x, name, heads) for name, heads in (("q", options.heads), ("k", options.groups)))
        v = writer.apply_linear(x, "self_attn.v_proj")
        v = writer.reshape_to(v, ("B", "T", options.groups, options.head_dim), source)
        q, k = self._turn_heads(q, k, source)
        if options.alibi:
            q, k = self._add_slopes(q, k)
        return self._attend(q, k, v, options.heads * options.head_dim, source)

    def _split_heads(self, x: str, name: str, heads: int) -> str:
        writer, dim, norm = self.writer, self.options.head_dim, f"self_attn.{name}_norm"
        shape, source = ("B", "T", heads, dim), "self_attn (Attention)"
        projected = writer.apply_linear(x, f"self_attn.{name}_proj")
        if self.options.qk_norm == "projection":
            return writer.reshape_to(apply_norm(writer, self.options, projected, norm), shape, source)
        split = writer.reshape_to(projected, shape, source)
        if self.options.qk_norm != "each_head":
            return apply_norm(writer, self.options, split, norm)
        label = f"{norm} (EachHeadNorm)"
        normed = writer.write("layer_norm", (split, "", ""), label, eps=self.options.norm.eps)
        return writer.write("mul", (normed, f"{norm}.weight"), label)

    def _turn_heads(self, q: str, k: str, source: str) -> tuple[str, str]:
        """Write the rotary embedding of queries and keys."""
        rotary = self.options.rotary[self.layer]
        if rotary is None:
            return q, k
        turned = [self.writer.write("rotary", (x, "positions"), source, **rotary) for x in (q, k)]
        return turned[0], turned[1]

    def _add_slopes(self, q: str, k: str) -> tuple[str, str]:
        """Write the features of queries and keys whose product is the slope times the position of the key."""
        options, writer, source = self.options, self.writer, "self_attn.position_scores (AlibiFeatures)"
        heads, groups = options.heads, options.groups
        values = [slope / options.scale for slope in alibi_slopes(heads)]
        slope = writer.write("constant", (), source, values=values, shape=[1, 1, heads, 1], dtype="float32")
        slope = writer.write("expand", (slope,), source, shape=["B", "T", heads, 1])
        slope = writer.write("cast", (slope,), source, dtype="compute")
        position = writer.write("cast", ("positions",), source, dtype="compute")
        position = writer.reshape_to(position, ("B", "T", 1, 1), source)
        position = writer.write("expand", (position,), source, shape=["B", "T", groups, 1]) if groups > 1 else position
        pairs = ((q, slope), (k, position))
        joined = [writer.write("concat", pair, source, dim=3) for pair in pairs]
        return joined[0], joined[1]

    def _attend(self, q: str, k: str, v: str, features: int, source: str) -> str:
        """Write the attention of the layer and its output projection."""
        options, writer, window = self.options, self.writer, self.options.windows[self.layer]
        scored = options.softcap or options.sinks
        kind = "ScoreAttention" if scored else "CausalAttention" if window is None else "WindowAttention"
        cap = {"softcap": options.softcap} if options.softcap else {}
        sinks = ("self_attn.attention.sinks",) if options.sinks else ()
        label = f"self_attn.attention ({kind})"
        attributes = {"causal": True, "scale": options.scale, "window": window, **cap}
        out = writer.write("attention", (q, k, v, *sinks), label, **attributes)
        return writer.apply_linear(writer.reshape_to(out, ("B", "T", features), source), "self_attn.o_proj")

    # Latent attention.

    def _declare_latent(self) -> None:
        options, writer, latent = self.options, self.writer, self.options.latent
        assert latent is not None
        queries = options.heads * (latent.plain_size + latent.rotary_size)
        if latent.query_rank:
            writer.declare_linear("self_attn.q_a_proj", options.hidden_size, latent.query_rank, options.qkv_bias)
            writer.declare("self_attn.q_a_layernorm.weight", latent.query_rank)
            writer.declare_linear("self_attn.q_b_proj", latent.query_rank, queries, False)
        else:
            writer.declare_linear("self_attn.q_proj", options.hidden_size, queries, False)
        short = latent.rank + latent.rotary_size
        writer.declare_linear("self_attn.kv_a_proj_with_mqa", options.hidden_size, short, options.qkv_bias)
        writer.declare("self_attn.kv_a_layernorm.weight", latent.rank)
        wide = options.heads * (latent.plain_size + latent.value_size)
        writer.declare_linear("self_attn.kv_b_proj", latent.rank, wide, False)
        values = options.heads * latent.value_size
        writer.declare_linear("self_attn.o_proj", values, options.hidden_size, options.output_bias)
        self._declare_sinks()

    def _apply_latent(self, x: str) -> str:
        options, writer, latent, source = self.options, self.writer, self.options.latent, "self_attn (LatentAttention)"
        assert latent is not None
        heads, plain, turned = options.heads, latent.plain_size, latent.rotary_size
        q = writer.reshape_to(self._project_queries(x), ("B", "T", heads, plain + turned), source)
        short = writer.apply_linear(x, "self_attn.kv_a_proj_with_mqa")
        inner = self._norm_short(writer.slice_last(short, 0, latent.rank, source), "kv_a_layernorm")
        kv = writer.apply_linear(inner, "self_attn.kv_b_proj")
        kv = writer.reshape_to(kv, ("B", "T", heads, plain + latent.value_size), source)
        k_plain = writer.slice_last(kv, 0, plain, source)
        v = writer.slice_last(kv, plain, plain + latent.value_size, source)
        q_plain = writer.slice_last(q, 0, plain, source)
        q_turned = writer.slice_last(q, plain, plain + turned, source)
        k_turned = writer.slice_last(short, latent.rank, latent.rank + turned, source)
        k_turned = writer.reshape_to(k_turned, ("B", "T", 1, turned), source)
        q_turned, k_turned = self._turn_heads(q_turned, k_turned, source)
        q = writer.write("concat", (q_plain, q_turned), source, dim=3)
        k_turned = writer.write("expand", (k_turned,), source, shape=["B", "T", heads, turned])
        k = writer.write("concat", (k_plain, k_turned), source, dim=3)
        return self._attend(q, k, v, heads * latent.value_size, source)

    def _project_queries(self, x: str) -> str:
        if "self_attn.q_proj.weight" in self.writer.parameters:
            return self.writer.apply_linear(x, "self_attn.q_proj")
        short = self._norm_short(self.writer.apply_linear(x, "self_attn.q_a_proj"), "q_a_layernorm")
        return self.writer.apply_linear(short, "self_attn.q_b_proj")

    def _norm_short(self, x: str, name: str) -> str:
        latent = self.options.latent
        assert latent is not None
        label = f"self_attn.{name} (RMSNorm)"
        return self.writer.write("rms_norm", (x, f"self_attn.{name}.weight"), label, eps=latent.eps)

    # MLP and experts.

    def _declare_mlp(self) -> None:
        experts = self.experts
        if experts is None:
            self._declare_dense("mlp", self.options.mlp_size)
            return
        self._declare_experts("mlp.routed" if experts.shared_size else "mlp", experts)
        if experts.shared_size:
            self._declare_dense("mlp.shared_expert", experts.shared_size)
            if experts.shared_gate:
                self.writer.declare_linear("mlp.shared_expert_gate", self.options.hidden_size, 1, False)

    def _declare_dense(self, name: str, size: int) -> None:
        options, writer = self.options, self.writer
        for part in ("gate_proj", "up_proj") if options.gated else ("up_proj",):
            writer.declare_linear(f"{name}.{part}", options.hidden_size, size, options.mlp_bias)
        writer.declare_linear(f"{name}.down_proj", size, options.hidden_size, options.mlp_bias)

    def _declare_experts(self, name: str, experts: ExpertOptions) -> None:
        writer, features, count, size = self.writer, self.options.hidden_size, experts.experts, experts.size
        writer.declare(f"{name}.gate.weight", count, features)
        if experts.biases:
            writer.declare(f"{name}.gate.bias", count)
        if experts.correction:
            writer.declare(f"{name}.gate.e_score_correction_bias", count, trainable=False)
        writer.declare(f"{name}.experts.gate_up_proj", count, 2 * size, features)
        writer.declare(f"{name}.experts.down_proj", count, features, size)
        if experts.biases:
            writer.declare(f"{name}.experts.gate_up_proj_bias", count, 2 * size)
            writer.declare(f"{name}.experts.down_proj_bias", count, features)

    def _apply_mlp(self, x: str) -> str:
        experts, writer, source = self.experts, self.writer, "mlp (SharedMoELayer)"
        if experts is None:
            return self._apply_dense(x, "mlp")
        if not experts.shared_size:
            return self._apply_experts(x, "mlp", experts)
        shared = self._apply_dense(x, "mlp.shared_expert")
        if experts.shared_gate:
            gate = writer.write("sigmoid", (writer.apply_linear(x, "mlp.shared_expert_gate"),), source)
            shared = writer.write("mul", (gate, shared), source)
        return writer.write("add", (self._apply_experts(x, "mlp.routed", experts), shared), source)

    def _apply_dense(self, x: str, name: str) -> str:
        writer, source = self.writer, f"{name} (MLP)"
        first = "gate_proj" if self.options.gated else "up_proj"
        inner = writer.apply_activation(writer.apply_linear(x, f"{name}.{first}"), self.options.activation, source)
        if self.options.gated:
            inner = writer.write("mul", (inner, writer.apply_linear(x, f"{name}.up_proj")), source)
        return writer.apply_linear(inner, f"{name}.down_proj")

    def _apply_experts(self, x: str, name: str, experts: ExpertOptions) -> str:
        further = [f"{name}.{parameter}" for parameter in experts.further_parameters.values()]
        weights = (f"{name}.gate.weight", f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj")
        attributes = experts.operator_attributes(self.options.activation)
        return self.writer.write("moe", (x, *weights, *further), f"{name} (MoE)", **attributes)
