"""Vision-language models of `transformers`: one file for each model type, which maps its config.json to options."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.multimodal.joint_fields import JointParts


def read_joint_types() -> dict[str, Callable[[ConfigFields], JointParts]]:
    """Return model type -> reader, of every file of this folder."""
    files = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {model_type: file.read_joint for file in files for model_type in file.MODEL_TYPES}
