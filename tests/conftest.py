"""For all tests: property tests have no deadline, because a busy machine is not a failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pipefit", deadline=None)
settings.load_profile("pipefit")
