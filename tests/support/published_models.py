"""Published models: by the id on huggingface.co, the fields of config.json that shapes depend on, and the number of
parameters that the authors or the files state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED_MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_models.json").read_text(encoding="utf-8")
)
