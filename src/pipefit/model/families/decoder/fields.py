"""Fields of a config.json that decoders share: sizes, rotary positions, windows, tied embeddings.

`RecordedFields` keeps every field that is read, so a configuration is written again without a second list of its
fields.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from pipefit.errors import UnsupportedModelError
from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.decoder.options import ACTIVATIONS
from pipefit.model.ops.rotary import rotary_frequencies


class RecordedFields(ConfigFields):
    """The fields of one config.json, and a record of the fields read: the first of a field's names, and its value or
    default."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        super().__init__(config, where)
        self.record: dict[str, Any] = {}

    def first_value(self, *names: str, default: Any = None) -> Any:
        value = super().first_value(*names, default=default)
        self.record[names[0]] = value
        return value

    def require_value(self, name: str, allowed: Any, default: Any = None) -> None:
        """Raise UnsupportedModelError if the field is present with another value than the supported one."""
        value = super().first_value(name, default=allowed if default is None else default)
        if value != allowed:
            allowed_text = f"{allowed!r}: other values are not supported"
            raise self.wrong_field(name, value, allowed_text, UnsupportedModelError)


def read_attention_sizes(fields: ConfigFields, groups_name: str = "num_key_value_heads") -> tuple[int, int, int, int]:
    """Return (hidden size, heads, key/value heads, features of a head). Raises ModelError if they do not fit."""
    hidden, heads = fields.read_count("hidden_size"), fields.read_count("num_attention_heads")
    groups = fields.read_count(groups_name, default=heads)
    fields.check_fields(
        heads % groups == 0,
        "The attention heads are no multiple of the key/value heads.",
        f"num_attention_heads {heads}, {groups_name} {groups}",
        "a multiple",
    )
    if fields.first_value("head_dim") is None:
        fields.check_fields(
            hidden % heads == 0,
            "The hidden size is no multiple of the attention heads.",
            f"hidden_size {hidden}, num_attention_heads {heads}",
            "a multiple, or the field head_dim",
        )
    return hidden, heads, groups, fields.read_count("head_dim", default=max(1, hidden // heads))


def usual_options(
    fields: RecordedFields,
    groups_name: str = "num_key_value_heads",
    *,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    mlp_size: tuple[str, int | None] = ("intermediate_size", None),
    padded: bool = True,
) -> dict[str, Any]:
    """Return the options of `DecoderOptions` without a default, but `norm`, from the fields that nearly all decoders
    have: full attention with the usual scale, and rotary positions in every layer.

    `activation` and `mlp_size` are the name and the default of a field. `padded`: whether the row of the padding token
    gets no gradient.
    """
    hidden, heads, groups, head_dim = read_attention_sizes(fields, groups_name)
    layers, vocab_size = fields.read_count("num_hidden_layers"), fields.read_count("vocab_size")
    return {
        "vocab_size": vocab_size,
        "padding": fields.read_padding(vocab_size) if padded else None,
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "scale": 1.0 / math.sqrt(head_dim),
        "mlp_size": fields.read_count(mlp_size[0], default=mlp_size[1]),
        "activation": fields.read_choice(activation[0], default=activation[1], allowed=ACTIVATIONS),
        "windows": (None,) * layers,
    }


def read_top_k(fields: ConfigFields, *names: str, experts: int, default: int) -> int:
    """Return the number of experts that a token selects. Raises ModelError if it is larger than `experts`."""
    top_k = fields.read_count(*names, default=default)
    fields.check_fields(
        top_k <= experts,
        "More experts per token than there are experts.",
        f"{names[0]} {top_k}, experts {experts}",
        "at most as many",
    )
    return top_k


def require_ungrouped(fields: ConfigFields, options: Mapping[str, Any], title: str) -> None:
    """Raise ModelError if several heads share keys and values."""
    fields.check_fields(
        options["groups"] == options["heads"],
        f"{title} has no grouped heads.",
        f"num_key_value_heads {options['groups']}",
        f"num_attention_heads, {options['heads']}",
    )


def warn_of_dropout(fields: ConfigFields, name: str = "attention_dropout") -> None:
    """Warn that the dropout of attention probabilities is ignored."""
    if fields.read_number(name, default=0.0) > 0:
        warnings.warn(f"{fields.where}: {name} is ignored: attention is computed without dropout", stacklevel=3)


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    *,
    theta: tuple[str, float] = ("rope_theta", 10000.0),
    partial: tuple[str, float] = ("partial_rotary_factor", 1.0),
) -> tuple[float, Mapping[str, Any] | None, int]:
    """Return (theta, scaling or None, rotated dimensions), from the fields of transformers 4 or 5.

    `theta` and `partial` are the name and the default of a field of transformers 4. Raises ModelError for a scaling
    that is not known.
    """
    parameters = dict(fields.first_value("rope_parameters", default={}))
    old = fields.first_value(theta[0])
    new = parameters.pop("rope_theta", None)
    fields.check_fields(
        None in (old, new) or old == new,
        f"The configuration gives two values of {theta[0]}.",
        f"{theta[0]} {old}, rope_parameters.rope_theta {new}",
        "one, or two equal ones",
    )
    base = float(new if new is not None else old if old is not None else theta[1])
    share = parameters.pop("partial_rotary_factor", None) or fields.read_number(partial[0], default=partial[1])
    scaling = parameters or dict(fields.first_value("rope_scaling", default={}))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rotary_dim = int(head_dim * share)
    fields.check_fields(
        rotary_dim % 2 == 0,
        "Rotary positions turn pairs of features.",
        f"{rotary_dim} features of a head",
        "an even number",
    )
    if kind == "default":
        return base, None, rotary_dim
    scaling = {"rope_type": kind, **{key: value for key, value in scaling.items() if key not in ("type", "rope_type")}}
    scaling.pop("rope_theta", None)
    scaling.pop("partial_rotary_factor", None)
    if kind == "yarn" and scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = fields.read_count("max_position_embeddings")
    rotary_frequencies({"theta": base, "dim": rotary_dim, "scaling": scaling})  # raises if a field is missing
    return base, scaling, rotary_dim


def read_rotary(
    fields: RecordedFields,
    options: Mapping[str, Any],
    style: str = "half",
    *,
    theta: tuple[str, float] = ("rope_theta", 10000.0),
    partial: tuple[str, float] | None = None,
) -> tuple[dict[str, Any], ...]:
    """Return the attributes of the rotary operator for each layer: equal ones. `partial`: the name and default of the
    field with the rotated share of a head, for a model type that has it."""
    names = partial or ("partial_rotary_factor", 1.0)
    base, scaling, dim = read_rope(fields, options["head_dim"], theta=theta, partial=names)
    del fields.record["rope_parameters"]
    fields.record |= {theta[0]: base, "rope_scaling": scaling and dict(scaling)}
    if partial is None:
        fields.check_fields(
            dim == options["head_dim"],
            "The model type has no heads with rotary positions in part.",
            f"partial_rotary_factor {dim / options['head_dim']}",
            "1",
        )
        fields.record.pop("partial_rotary_factor", None)
    else:
        fields.record[partial[0]] = dim / options["head_dim"]
    fields.read_count("max_position_embeddings", default=2048)
    layers: int = options["layers"]
    return ({"theta": base, "dim": dim, "scaling": scaling, "style": style},) * layers


def read_layer_types(fields: RecordedFields, layers: int, default: list[str]) -> list[str]:
    """Return the attention of each layer, `sliding_attention` or `full_attention`. Raises ModelError for other ones."""
    types = list(fields.first_value("layer_types", default=default))
    known = ("sliding_attention", "full_attention")
    if len(types) != layers or any(kind not in known for kind in types):
        raise fields.wrong_field("layer_types", types, f"{layers} of {' and '.join(known)}, one for each layer")
    return types


def windows_of_types(fields: RecordedFields, types: list[str], default: int | None = None) -> tuple[int | None, ...]:
    """Return the window of each layer from their attention."""
    if "sliding_attention" not in types:
        return (None,) * len(types)
    window = fields.read_count("sliding_window", default=default)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
