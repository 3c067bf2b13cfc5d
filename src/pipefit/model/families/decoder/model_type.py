"""The configuration of a decoder: options, names in files, and the fields of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.decoder.stored_names import StoredNames
from pipefit.model.families.family import InitialValue, ModelFamily, WeightTensor

BUILDER = "pipefit.model.families.decoder.layers"
GRAPHS = "pipefit.model.families.decoder.graphs"

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that training does not read, and generation does. They are written as they were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One model of a model type."""

    fields: Mapping[str, Any]
    "The fields of config.json that the model type reads, with defaults."
    decoder: DecoderOptions
    names: StoredNames
    initializer_range: float

    @property
    def rotary(self) -> list[Mapping[str, Any]]:
        """The different attributes of rotary operators in the layers, exactly as configured."""
        return [
            angles for i, angles in enumerate(self.decoder.rotary) if angles and angles not in self.decoder.rotary[:i]
        ]

    def to_config(self) -> dict[str, Any]:
        return dict(self.fields)

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        return self.names.find_tensors(name, self.decoder)

    def initial(self, name: str) -> InitialValue:
        if name.endswith("norm.weight"):
            return InitialValue("zeros" if self.decoder.norm.offset else "ones")
        return InitialValue("zeros") if name.endswith("bias") else InitialValue("normal", self.initializer_range)


def finish_config(
    fields: RecordedFields, architecture: str, decoder: DecoderOptions, names: StoredNames | None = None
) -> DecoderConfig:
    """Return the configuration of a model type, whose fields have been read."""
    spread = fields.read_number("initializer_range", default=0.02)
    head = {"architectures": [architecture], "model_type": str(fields.config["model_type"])}
    tokens = {name: fields.config[name] for name in SPECIAL_TOKENS if name in fields.config}
    return DecoderConfig(
        fields=head | fields.record | tokens, decoder=decoder, names=names or StoredNames(), initializer_range=spread
    )


def decoder_family(model_type: str, read: Callable[[Mapping[str, Any], str], DecoderConfig]) -> ModelFamily:
    """Return the family of one model type."""
    return ModelFamily(name=model_type, model_types=(model_type,), read=read, builder=BUILDER, graphs=GRAPHS)
