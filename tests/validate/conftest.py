"""Results that several tests read are worked out once."""

from __future__ import annotations

import pytest

from pipefit.validate.records import ValidationResult
from pipefit.validate.sets import find_sets


@pytest.fixture(scope="session")
def results() -> dict[tuple[str, str], ValidationResult]:
    """(set, quantity) -> its result."""
    return {(result.set, result.quantity): result for run in find_sets().values() for result in run()}
