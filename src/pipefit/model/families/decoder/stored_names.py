"""Names of a decoder's parameters in files: modules with other names, fused projections, experts.

Parameters are called as those of Llama in `transformers`, whatever the model type. A file may hold several of them in
one tensor (`RowParts`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.family import RowParts, WeightTensor

TOKEN_TABLE = "model.embed_tokens.weight"
OUTPUT_TABLE = "lm_head.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def block_parameter_name(layer: int, local: str) -> str:
    """Return the global name of a block's parameter. Routed experts beside a shared one are named like experts without
    one, and sinks like a parameter of the attention."""
    return f"model.layers.{layer}." + local.replace("mlp.routed.", "mlp.").replace("attention.sinks", "sinks")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """The names of a model type's tensors. A module without an entry has the name that Llama has."""

    layers: str = "model.layers"
    "The list of layers."
    modules: Mapping[str, str] = field(default_factory=dict)
    "Module, or parameter, of a layer or of the model -> its name in the file."
    fused: Mapping[str, tuple[str, RowParts]] = field(default_factory=dict)
    "Module of a layer -> name in the file of the module that holds it among others, and its rows there."
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    "The projections of an expert."
    stacked_experts: bool = False
    "Whether the file has all experts in one tensor, (E, in, out), whose columns alternate between gate and up."

    def find_tensors(self, name: str, options: DecoderOptions) -> tuple[WeightTensor, ...]:
        """Return the tensors of the files that hold a parameter."""
        layer = _LAYER.match(name)
        prefix = f"{self.layers}.{layer.group(1)}." if layer else ""
        module, _, end = name[layer.end() if layer else 0 :].rpartition(".")
        if module == "mlp.experts":
            return self._expert_tensors(prefix + self.modules.get(module, module), end, options)
        if layer and module in self.fused:
            stored, rows = self.fused[module]
            return (WeightTensor(f"{prefix}{stored}.{end}", rows=rows),)
        renamed = f"{self.modules.get(module, module)}.{end}"
        return (WeightTensor(prefix + self.modules.get(f"{module}.{end}", renamed)),)

    def _expert_tensors(self, module: str, end: str, options: DecoderOptions) -> tuple[WeightTensor, ...]:
        """Return the tensors of a layer's experts, one a projection and expert."""
        assert options.experts is not None
        count, size = options.experts.experts, options.experts.size
        if self.stacked_experts:
            alternating = end.startswith("gate_up_proj")
            return (WeightTensor(f"{module}.{end}", transposed=not end.endswith("bias"), alternating=alternating),)
        gate, up, down = self.experts
        if end == "down_proj":
            return tuple(WeightTensor(f"{module}.{e}.{down}.weight", (e,)) for e in range(count))
        halves = ((gate, (0, size)), (up, (size, 2 * size)))
        return tuple(
            WeightTensor(f"{module}.{e}.{part}.weight", (e, rows)) for e in range(count) for part, rows in halves
        )


def fuse_projections(options: DecoderOptions, stored: str, groups: int = 1) -> dict[str, tuple[str, RowParts]]:
    """Return queries, keys and values as parts of one module: those of the first of `groups` groups of heads, then of
    the next. In a group, the queries are before the keys and the values."""
    queries, keys = (heads // groups * options.head_dim for heads in (options.heads, options.groups))
    edges = (0, queries, queries + keys, queries + 2 * keys)
    return _consecutive_parts("self_attn", ("q_proj", "k_proj", "v_proj"), stored, groups, edges)


def fuse_gate(options: DecoderOptions, stored: str = "mlp.gate_up_proj") -> dict[str, tuple[str, RowParts]]:
    """Return gate and up projection as parts of one module, gate first."""
    edges = (0, options.mlp_size, 2 * options.mlp_size)
    return _consecutive_parts("mlp", ("gate_proj", "up_proj"), stored, 1, edges)


def _consecutive_parts(
    module: str, parts: tuple[str, ...], stored: str, groups: int, edges: tuple[int, ...]
) -> dict[str, tuple[str, RowParts]]:
    return {
        f"{module}.{part}": (stored, RowParts(groups=groups, size=edges[-1], start=start, stop=stop))
        for part, start, stop in zip(parts, edges, edges[1:], strict=False)
    }
