"""Reading fields of a config.json, with errors that give the field, the seen value and the allowed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError, UnsupportedModelError

FIELD_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"pad_token_id": 0},
    "cohere2": {"pad_token_id": 0},
    "deepseek_v2": {"n_shared_experts": 2, "moe_intermediate_size": 1407},
    "gemma": {"head_dim": 256, "pad_token_id": 0},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0},
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2, "pad_token_id": 151329},
    "glm4_moe": {"num_key_value_heads": 8, "moe_intermediate_size": 1408},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "olmo2": {"pad_token_id": 1},
    "opt": {"pad_token_id": 1},
    "phi3": {"pad_token_id": 32000},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "moe_intermediate_size": 768},
    "smollm3": {"pad_token_id": 128004},
    "starcoder2": {"num_key_value_heads": 2, "initializer_range": 0.018042},
}
"""Model type -> defaults that the configuration class of `transformers` has where most classes have other ones."""


class ConfigFields:
    """The fields of one config.json, with the defaults of its model type for absent fields."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        defaults = FIELD_DEFAULTS.get(str(config.get("model_type")), {})
        self.config: Mapping[str, Any] = {**defaults, **config}
        self.where = where

    def first_value(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is present and not null."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        return default

    def read_count(self, *names: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.first_value(*names, default=default)
        if value is None:
            raise ModelError(
                f"The configuration lacks the field {names[0]!r}.",
                where=self.where,
                allowed="a positive integer",
                next_step=f"add {names[0]!r} to the config.json",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong_field(names[0], value, "a positive integer")
        return value

    def read_number(self, *names: str, default: float) -> float:
        """A number, zero or more."""
        value = self.first_value(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise self.wrong_field(names[0], value, "a number, zero or more")
        return float(value)

    def read_padding(self, vocab_size: int) -> int | None:
        """Return the token whose row of the embedding gets no gradient, or None: `pad_token_id`, as
        `torch.nn.Embedding` reads it."""
        token = self.config.get("pad_token_id")
        if isinstance(token, bool) or not isinstance(token, int) or not -vocab_size <= token < vocab_size:
            return None
        return token % vocab_size

    def read_flag(self, name: str, default: bool) -> bool:
        value = self.first_value(name, default=default)
        if not isinstance(value, bool):
            raise self.wrong_field(name, value, "true or false")
        return value

    def read_choice(self, *names: str, default: str, allowed: Mapping[str, str]) -> str:
        """Return the entry of `allowed` for the field's value. Raises UnsupportedModelError for any other text."""
        value = self.first_value(*names, default=default)
        if value not in allowed:
            error = UnsupportedModelError if isinstance(value, str) else ModelError
            raise self.wrong_field(names[0], value, ", ".join(allowed), error)
        return allowed[value]

    def width_of_heads(self, width: Sequence[str], heads: Sequence[str]) -> tuple[int, int]:
        """(hidden size, number of attention heads), each by the first of its names that is present. Raises ModelError
        if the heads do not divide the hidden size."""
        hidden, count = self.read_count(*width), self.read_count(*heads)
        self.check_fields(
            hidden % count == 0,
            "The hidden size is no multiple of the attention heads.",
            f"{width[0]} {hidden}, {heads[0]} {count}",
            "a multiple",
        )
        return hidden, count

    def check_fields(self, holds: bool, what: str, seen: object, allowed: str) -> None:
        """Raise ModelError if `holds` is false: fields contradict each other."""
        if not holds:
            raise ModelError(what, where=self.where, seen=seen, allowed=allowed)

    def wrong_field(self, name: str, value: Any, allowed: str, error: type[ModelError] = ModelError) -> ModelError:
        return error(
            f"The field {name!r} of the configuration has a wrong value.",
            where=self.where,
            seen=repr(value),
            allowed=allowed,
        )
