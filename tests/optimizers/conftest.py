"""The small models of the planner's and the worker's tests are used here too."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("plan", "run"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
