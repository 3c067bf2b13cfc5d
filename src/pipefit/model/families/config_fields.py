"""Reading fields of a config.json, with errors that give the field, the seen value and the allowed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError, UnsupportedModelError


class ConfigFields:
    """The fields of one config.json."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
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
