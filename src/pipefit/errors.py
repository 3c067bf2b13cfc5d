"""The errors a user can meet. Each says what is wrong, where, what was seen, what is allowed, and what to do next.

A user's mistake is a `PipefitError`; the command line prints it and exits with code 2. A broken invariant of our
own is an `assert`, never a `PipefitError`.
"""

from __future__ import annotations

from collections.abc import Iterable


class PipefitError(ValueError):
    """A mistake in the user's input, or a fact about the user's machines, told so that it can be mended.

    `what` is the mistake in one sentence; `where` the file, field or option; `seen` the value found;
    `allowed` what would have been accepted; `next_step` a command or change to try.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        seen: object | None = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.seen = seen
        self.allowed = allowed
        self.next_step = next_step
        super().__init__(self.full_text())

    def full_text(self) -> str:
        """The whole message, a line for each part that is known."""
        parts = [self.what]
        for label, value in (
            ("where", self.where),
            ("seen", self.seen),
            ("allowed", self.allowed),
            ("try", self.next_step),
        ):
            if value is not None:
                parts.append(f"  {label}: {value}")
        return "\n".join(parts)


class FormatError(PipefitError):
    """A file that cannot be read as what it should be: truncated, of another version, or with a wrong field."""


class ModelError(PipefitError):
    """A model that is unknown, or whose configuration contradicts itself."""


class ClusterError(PipefitError):
    """A cluster file that is incomplete or contradicts itself."""


class ScheduleError(PipefitError):
    """A schedule that is wrong, or cannot be made for what was asked. Its text draws the bad cell."""


class DeadlockError(ScheduleError):
    """A lowered schedule that would hang under rendezvous sends."""


class PlanError(PipefitError):
    """A plan that is malformed, or contradicts itself."""


class StalePlanError(PlanError):
    """A plan made for another cluster or model than the present one."""


class DoesNotFitError(PlanError):
    """Nothing, or not this plan, fits in the memory of the devices."""


class DataError(PipefitError):
    """A corpus that is empty, unreadable or not what it was said to be."""


class CheckpointError(PipefitError):
    """A checkpoint that is incomplete, damaged, or of another model."""


class RunError(PipefitError):
    """A run that cannot start or had to stop: ranks that disagree, a rank that died, memory that ran out."""


class LabError(PipefitError):
    """An emulated cluster that cannot be made on this machine, or that did not keep to what it emulates."""


def most_like(name: str, known: Iterable[str]) -> list[str]:
    """The known name that is most like this one; none if nothing is like it."""
    import difflib

    return difflib.get_close_matches(name, list(known), n=1)
