"""Error handling for files that a run writes besides its checkpoints: a disk error gives a message, not a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipefit.errors import RunError


@contextmanager
def write_errors(what: str, where: Path) -> Iterator[None]:
    """Raise RunError naming `what` ("trace") for an OSError, or safetensors' own error, within the block."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"The {what} cannot be written.",
            where=str(where),
            seen=getattr(error, "strerror", None) or error,
            next_step="check the disk's room and permissions; continue from the last checkpoint with --resume",
        ) from None
