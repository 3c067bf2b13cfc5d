"""Labels of modules in captured graphs: the class of an operator's source module.

A label is part of a graph's hash, and plans and checkpoints store hashes. A renamed class of pipefit's own families
therefore keeps its first label here, and existing files stay valid.
"""

from __future__ import annotations

from typing import Any

OWN_MODULES = "pipefit.model."

FIRST_LABELS = {
    "DecoderAttention": "Attention",
    "DecoderBlock": "Block",
    "DecoderEmbed": "Embed",
    "DecoderHead": "Head",
    "DecoderMLP": "MLP",
    "DiffusionBlock": "Block",
    "DiffusionEmbed": "Embed",
    "DiffusionModulation": "Modulation",
    "DiffusionOutput": "Output",
    "GPT2Attention": "Attention",
    "GPT2Block": "Block",
    "GPT2Embed": "Embed",
    "GPT2Head": "Head",
    "GPT2MLP": "MLP",
    "MoEExperts": "Experts",
    "MoELayer": "MoE",
    "MoERouter": "Router",
    "MultimodalEmbed": "Embed",
    "MultimodalHead": "Head",
    "OperatorModule": "Leaf",
    "PixelNormalise": "Normalise",
    "TokenLoss": "Loss",
    "VisionAttention": "Attention",
    "VisionBlock": "Block",
    "VisionEmbed": "Embed",
    "VisionMLP": "MLP",
    "VisionProjector": "Projector",
}
"""Class name of a family's module today -> its label in graphs."""


def source_label(kind: type | str | Any) -> str:
    """Return the label of a module's class, given as a type or as its dotted name (as `nn_module_stack` has it)."""
    dotted = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
    name = dotted.rpartition(".")[2]
    return FIRST_LABELS.get(name, name) if dotted.startswith(OWN_MODULES) else name
