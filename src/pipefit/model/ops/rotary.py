"""rotary(x_BTHK, positions_BT): rotary position embedding (Su et al., 2021) of the first `dim` features of each head.

Pairs are (i, i + dim/2) in style `half` (GPT-NeoX, Hugging Face) and (2i, 2i + 1) in style `interleaved` (Meta, GPT-J).
Pair i is rotated by positions * frequency[i]; `rotary_frequencies` computes the frequencies for every known scaling.
Saves nothing: the backward rotates in the other direction, and the cos/sin table is cached with the step plan's
positions.

With `axes`, a token has several positions (B, T, A), and `axes` names the position that turns each pair (M-RoPE, Wang
et al., 2024). With `merge`, the positions are the grid (B, T, 4) of squares of images, and x is (B, T, merge^2, H, K).
The row (0) or the column (1) of the patch turns a pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipefit.errors import ModelError, UnsupportedModelError
from pipefit.model.ops.kind import OperatorCall, OperatorKind, same_shape

SCALINGS = ("default", "linear", "llama3", "yarn", "frequencies")

AXES = 3
"""Positions of a token in a model with images: time, row and column."""

TABLE_ATTRIBUTES = ("theta", "dim", "scaling", "axes", "merge")
"""The attributes that decide the table of cosines and sines."""


def rotary_frequencies(attributes: Mapping[str, Any]) -> tuple[list[float], float]:
    """(radians per position of each of the dim/2 pairs, factor of cos and sin) for the attributes of a rotary operator.

    `attributes["scaling"]` is null or the object that Hugging Face calls rope_scaling, or
    {"rope_type": "frequencies", "values": [...], "attention_factor": f}. Raises ModelError for an unknown type.
    """
    theta, dim = float(attributes["theta"]), int(attributes["dim"])
    base = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = attributes.get("scaling")
    if not scaling:
        return base, 1.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, 1.0
    if kind == "frequencies":
        return [float(value) for value in scaling["values"]], float(scaling.get("attention_factor", 1.0))
    if kind == "linear":
        return [frequency / _require_field(scaling, "factor") for frequency in base], 1.0
    if kind == "llama3":
        return [_llama3_frequency(frequency, scaling) for frequency in base], 1.0
    if kind == "yarn":
        return _yarn_frequencies(base, theta, dim, scaling)
    raise UnsupportedModelError(
        "The rotary scaling is unknown.", where="rope_scaling", seen=repr(kind), allowed=", ".join(SCALINGS[:-1])
    )


def _require_field(scaling: Mapping[str, Any], name: str) -> float:
    if scaling.get(name) is None:
        raise ModelError(
            f"The rotary scaling needs the field {name!r}.",
            where="rope_scaling",
            seen=dict(scaling),
            allowed="a number",
        )
    return float(scaling[name])


def _llama3_frequency(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones unchanged, with a linear blend between (Meta's
    `apply_scaling`)."""
    factor, low, high = (
        _require_field(scaling, "factor"),
        _require_field(scaling, "low_freq_factor"),
        _require_field(scaling, "high_freq_factor"),
    )
    old_length = _require_field(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / frequency
    if wavelength > old_length / low:
        return frequency / factor
    if wavelength < old_length / high:
        return frequency
    smooth = (old_length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn_frequencies(
    base: list[float], theta: float, dim: int, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """YaRN (Peng et al., 2023, section 3.2): a ramp over the pairs from original to interpolated frequencies, and
    cos/sin scaled by 0.1 ln(factor) + 1."""
    factor = _require_field(scaling, "factor")
    old_length = _require_field(scaling, "original_max_position_embeddings")
    beta_fast, beta_slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def pair_of(rotations: float) -> float:
        return dim * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    result = []
    for i, frequency in enumerate(base):
        ramp = min(1.0, max(0.0, (i - low) / width))
        result.append(frequency / factor * ramp + frequency * (1 - ramp))
    return result, _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale_of(float(scaling["mscale"])) / mscale_of(float(scaling["mscale_all_dim"]))
    return mscale_of(1.0)


def _extra_bytes(call: OperatorCall) -> int:
    """The two halves of the rotated features, before concatenation."""
    x = call.inputs[0]
    assert x is not None
    return math.prod(x[:-1]) * int(call.attributes["dim"]) * call.compute_bytes


def _table_of_positions(attributes: Mapping[str, Any]) -> tuple[str, int]:
    """Cos and sin of `dim / 2` angles, of every patch of a token."""
    key = repr([attributes.get(name) for name in TABLE_ATTRIBUTES])
    return key, 2 * (int(attributes["dim"]) // 2) * int(attributes.get("merge", 1)) ** 2


OPERATORS = (
    OperatorKind(
        kind="rotary",
        summary="Rotary position embedding of (rows, tokens, heads, head dim); computes cos and sin itself.",
        inputs=("x", "positions"),
        attributes={
            "theta": "base of the frequencies",
            "dim": "features of a head that turn (the first ones); the rest pass",
            "scaling": "null or the rope_scaling object; see `rotary_frequencies`",
            "style": "`half` pairs (i, i + dim/2), `interleaved` pairs (2i, 2i + 1)",
            "axes": "absent, or for each pair the one of a token's several positions that turns it",
            "merge": "absent, or the side in patches of the square that a token stands for; positions are a grid",
        },
        shapes=same_shape,
        forward_extra=_extra_bytes,
        backward_extra=_extra_bytes,
        mixes_features=True,
        position_table=_table_of_positions,
    ),
)
