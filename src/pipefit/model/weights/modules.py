"""Initial weights of a multimodal model from the directories of its parts: `vision=DIR,language=DIR`.

A part is a Hugging Face directory: an image encoder, or a decoder. Modules without a directory (the
projector, the generator) get their usual initial values. Torch is imported inside `files.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.families.build import typed_config
from pipefit.model.families.multimodal.config import MultimodalConfig
from pipefit.model.families.multimodal.processor import PIXEL_FIELDS
from pipefit.model.registry import read_json
from pipefit.model.weights.files import ParameterBox, WeightFiles

WEIGHT_MODULES = ("vision", "language")
"""Modules that can have a directory."""

ReadParameter = Callable[[str, Sequence[int], ParameterBox], Any]
"""(global name, shape, box) -> that part of the parameter, a tensor."""


def is_parts_text(text: str) -> bool:
    """Return whether `text` has the form `vision=DIR` instead of being one directory of a complete model."""
    return any(text.startswith(f"{part}=") for part in WEIGHT_MODULES)


def split_parts(text: str, where: str = "--weights") -> dict[str, Path]:
    """Return module -> directory. Raises ModelError if the text is malformed."""
    directories: dict[str, Path] = {}
    for item in text.split(","):
        part, equal, directory = item.partition("=")
        if not equal or not directory or part not in WEIGHT_MODULES or part in directories:
            raise ModelError(
                "The directories of module weights are written wrongly.",
                where=where,
                seen=item,
                allowed=" and ".join(f"{part}=DIR" for part in WEIGHT_MODULES) + ", each once, with a comma between",
            )
        directories[part] = Path(directory)
    return directories


def module_weights(
    parts: Mapping[str, Path], family: str, config: Mapping[str, Any], otherwise: ReadParameter
) -> ReadParameter:
    """Return a function that reads parameters from the directories of modules, and all others from `otherwise`.

    Raises ModelError if the model has no such module, the directory has another configuration, or weights are missing.
    """
    typed = typed_config(family, config)
    files: dict[str, WeightFiles] = {}
    for part, directory in parts.items():
        inner = getattr(typed, part) if isinstance(typed, MultimodalConfig) else None
        if inner is None:
            raise ModelError(
                "The model has no such module to give weights to.",
                where="--weights",
                seen=f"{part}={directory}",
                allowed=", ".join(name for name in WEIGHT_MODULES if getattr(typed, name, None)) or "one directory",
            )
        _check_same_config(part, directory, typed)
        files[part] = WeightFiles(directory, family, config, inner)

    def read_parameter(name: str, shape: Sequence[int], box: ParameterBox) -> Any:
        part, _, inner = name.partition(".")
        if part not in files or name.startswith("vision.projector."):
            return otherwise(name, shape, box)
        return files[part].read(inner, shape, box)

    return read_parameter


_EITHER = {"initializer_range", *PIXEL_FIELDS, "max_position_embeddings", "architectures"}
"""Configuration fields that do not affect the weights."""


def _check_same_config(part: str, directory: Path, typed: Any) -> None:
    """Raise ModelError if a directory's config.json describes another module than the model's, FormatError if it is
    damaged."""
    from pipefit.model.families.multimodal import vision_config as vision
    from pipefit.model.families.multimodal.joint_fields import read_language

    path = directory / "config.json"
    if not path.is_file():
        return
    read: Any = vision.read if part == "vision" else read_language
    stored = read(read_json(path), str(path)).to_config()
    wanted = getattr(typed, part).to_config()
    names = [n for n in sorted({*stored, *wanted} - _EITHER) if stored.get(n) != wanted.get(n)]
    if names:
        raise ModelError(
            "The weights have another configuration than the module of the model.",
            where=str(path),
            seen=", ".join(f"{name} {stored.get(name)}" for name in names[:4]),
            allowed=", ".join(f"{name} {wanted.get(name)}" for name in names[:4]) + f", as in {part!r} of the model",
            next_step="give weights of that configuration, or plan the model with the configuration of the weights",
        )
