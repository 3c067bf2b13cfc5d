"""How the process of a rank ends: at once, with everything said."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """End this process here and now, with what is to be done at an exit done.

    For a rank that spoke to others. Threads of gloo, of the store and of the heartbeat may still wait inside C++, and
    an interpreter that is taken down around them sometimes aborts ("terminate called without an active exception"): a
    run that had done all its work would end as one with a rank that died.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whoever read what is said may be gone
        os._exit(code)
