"""Names of the tensors in files that hold all modules of a vision-language model of `transformers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipefit.model.families.family import ModelConfig, WeightTensor
from pipefit.model.families.multimodal.vision_config import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class JointNames:
    """The names of one model type. Each module has a prefix; a few parameters have names of their own."""

    vision: str = "vision_tower."
    language: str = "language_model."
    projector: str = "multi_modal_projector."
    projector_parts: Mapping[str, WeightTensor] = field(default_factory=dict)
    "Parameter of the projector -> its tensor, without the prefix; all others have pipefit's name."
    root_parts: Mapping[str, str] = field(default_factory=dict)
    "Parameter of the projector -> its tensor that stands beside the modules."
    decoder: str = "model."
    "Prefix of the layers of the language model, behind that of the module."
    inner: str = "model."
    "What stands before the prefixes in files with the names that the modules have in memory."
    towers: tuple[str, ...] = ("vision_model.",)
    "What stands behind the encoder's prefix in older files."

    def find_tensors(self, name: str, vision: VisionConfig | None, language: ModelConfig) -> tuple[WeightTensor, ...]:
        """Return the tensors that hold the parameter with this global name."""
        module, inner = name.split(".", 1)
        if module == "language":
            return tuple(self._language_tensor(block) for block in language.stored_tensors(inner))
        if inner.startswith("projector."):
            part = inner.removeprefix("projector.")
            if part in self.root_parts:
                return (self._with_prefix(WeightTensor(self.root_parts[part]), ""),)
            block = self.projector_parts.get(part, WeightTensor(part))
            return (self._with_prefix(block, self.projector),)
        assert vision is not None
        return tuple(self._vision_tensor(block) for block in vision.stored_tensors(inner))

    def _vision_tensor(self, block: WeightTensor) -> WeightTensor:
        older = tuple(f"{self.vision}{tower}{block.name}" for tower in self.towers)
        new = self._with_prefix(block, self.vision)
        return dataclasses.replace(new, further_names=new.further_names + older)

    def _language_tensor(self, block: WeightTensor) -> WeightTensor:
        plain = block.name.removeprefix("model.")
        if plain == block.name:
            return dataclasses.replace(block, name=f"{self.language}{plain}", further_names=(plain,))
        in_memory = f"{self.inner}language_model.{plain}"
        return dataclasses.replace(block, name=f"{self.language}{self.decoder}{plain}", further_names=(in_memory,))

    def _with_prefix(self, block: WeightTensor, prefix: str) -> WeightTensor:
        name = f"{prefix}{block.name}"
        return dataclasses.replace(block, name=name, further_names=(f"{self.inner}{name}",))
