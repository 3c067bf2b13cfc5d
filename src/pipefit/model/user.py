"""A user's own layers: `FILE.py:FUNCTION`, a function without arguments that returns a list of nn.Module layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipefit.errors import ModelError


def load_function(source: str) -> Callable[[], list[Any]]:
    """The function that `source` names. Raises ModelError where there is no such file or function."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ModelError("The file of the model does not exist.", where=source, seen=file, allowed="FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"pipefit_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ModelError(
            "The file has no such function.", where=str(path), seen=name, allowed=", ".join(public) or "a function"
        )
    return function  # type: ignore[no-any-return]
