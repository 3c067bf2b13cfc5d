"""A user's own model: `FILE.py:FUNCTION`, a function without arguments that returns a list of nn.Module layers, or an
`Example` of a complete model. A class of `transformers` (`any_class.py`) is such an example, too."""

from __future__ import annotations

import importlib.util
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipefit.codec import content_digest
from pipefit.errors import ModelError, PipefitError
from pipefit.model.any_class import FIELDS, library_example
from pipefit.model.example import Example


def open_user_model(config: Mapping[str, Any], with_values: bool = True) -> Any:
    """Return the Example or list of layers that the configuration of a user's model names. A class of `transformers`
    has parameters without memory if `with_values` is false. Raises ModelError if the model cannot be made."""
    if FIELDS in config:
        return library_example(config, with_values)
    return make_user_model(str(config.get("source", "")))


def make_user_model(source: str) -> Any:
    """Call the function that `source` names and return its Example or list of layers. Raises ModelError if the call
    fails or returns any other object."""
    function = load_function(source)
    user_model = _run_user_code(function, source, "The function of the model failed.")
    if isinstance(user_model, Example):
        return user_model
    if not isinstance(user_model, (list, tuple)) or not user_model:
        raise ModelError(
            "The function returns no model.",
            where=source,
            seen="an empty list" if isinstance(user_model, (list, tuple)) else type(user_model).__name__,
            allowed="a list of nn.Module layers, or pipefit.model.example.Example(module=..., inputs=...)",
            next_step="for a whole nn.Module give an Example" if hasattr(user_model, "named_parameters") else None,
        )
    return list(user_model)


@contextmanager
def seeded_generators(*key: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python from a key while user code runs, and restore them afterwards.
    Equal keys give equal numbers in every process."""
    import numpy as np
    import torch

    seed = int(content_digest(list(key))[:15], 16)
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def load_function(source: str) -> Callable[[], Any]:
    """Return the function that `source` names. Raises ModelError if the file or function does not exist or the import
    fails."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ModelError("The file of the model does not exist.", where=source, seen=file, allowed="FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"pipefit_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _run_user_code(lambda: loader.exec_module(module), source, "The file of the model cannot be imported.")
    function = getattr(module, name, None)
    if not callable(function):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ModelError(
            "The file has no such function.", where=str(path), seen=name, allowed=", ".join(public) or "a function"
        )
    return function  # type: ignore[no-any-return]


def _run_user_code(function: Callable[[], Any], source: str, what: str) -> Any:
    """Return the result of the user's code. Its exceptions become one ModelError with the line in the user's file."""
    file = str(Path(source.rpartition(":")[0]))
    try:
        return function()
    except PipefitError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().splitlines()
        raise ModelError(
            what,
            where=file if line is None else f"{file}, line {line}",
            seen=f"{type(error).__name__}: {text[0] if text else ''}",
            next_step=f"run it in Python to see the full traceback: python -i {file}",
        ) from None
