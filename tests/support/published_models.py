"""Published models: by the id on huggingface.co, the fields of config.json that shapes depend on, and the number of
parameters that the authors or the files state."""

from __future__ import annotations

from typing import Any

from benchmarks.models.published import read_models

ALL_MODELS: dict[str, dict[str, Any]] = read_models()

PUBLISHED_MODELS = {name: entry for name, entry in ALL_MODELS.items() if "class" not in entry}
"""The models of native families."""
