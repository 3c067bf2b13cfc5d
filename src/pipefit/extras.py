"""Optional packages: their extras, and one message where a package is missing."""

from __future__ import annotations

import importlib.util

from pipefit.errors import PipefitError

EXTRAS = {
    "torch": ("run", "PyTorch"),
    "safetensors": ("run", "safetensors"),
    "tokenizers": ("run", "tokenizers"),
    "jinja2": ("run", "Jinja2"),
    "transformers": ("transformers", "transformers"),
    "pyarrow": ("parquet", "pyarrow"),
    "PIL": ("images", "Pillow"),
    "ray": ("ray", "Ray"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "ortools": ("exact", "OR-Tools"),
}
"""Module -> the extra of pipefit that installs it, and its name."""


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def install_command(module: str) -> str:
    """Return the command that installs the extra with this module."""
    return f"pip install 'pipefit[{EXTRAS[module][0]}]'"


def missing_package(error: ModuleNotFoundError) -> PipefitError | None:
    """Return the error for an optional package that is not installed; None for any other module."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    extra, title = EXTRAS[module]
    return PipefitError(
        f"This needs {title}, which is not installed.",
        where=f"module {module}",
        next_step=install_command(module)
        + ("; on Linux that takes the CUDA build of PyTorch unless another one is installed" if extra == "run" else ""),
    )
