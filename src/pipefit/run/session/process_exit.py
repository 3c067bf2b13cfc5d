"""Immediate exit of a rank's process, after its exit functions and output."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """Run the exit functions, flush the output, and end this process at once.

    For a rank that communicated with others. Threads of gloo, of the store and of the heartbeat may still wait inside
    C++, and a normal interpreter shutdown around them sometimes aborts ("terminate called without an active
    exception"): a finished run would then look like one with a dead rank.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # the reader of the output may be gone
        os._exit(code)
