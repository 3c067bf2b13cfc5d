"""The errors shown to users: each says what is wrong, where, the value seen, the values allowed, and the next step.

A user's mistake is a `PipefitError`; the command line prints it and exits with code 2. A broken internal invariant is
an `assert`, never a `PipefitError`.
"""

from __future__ import annotations

from collections.abc import Iterable


class PipefitError(ValueError):
    """A mistake in the user's input, or a property of the user's machines that the user can change.

    `what` is the mistake in one sentence; `where` the file, field or option; `seen` the value found;
    `allowed` the accepted values; `next_step` a command or change to try.
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
        """Return the full message, one line for each known part."""
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


class CaptureWarning(UserWarning):
    """A limit of a captured model, such as an operator that is not divided. Every opening of the model repeats it."""


class FormatError(PipefitError):
    """A file that cannot be parsed as its format: truncated, of another version, or with a wrong field."""


class ModelError(PipefitError):
    """An unknown model, or a model with a contradictory configuration."""


class UnsupportedModelError(ModelError):
    """A valid model configuration with a value that the family of pipefit does not compute."""


class ClusterError(PipefitError):
    """A cluster file that is incomplete or contradicts itself."""


class MissingFactsError(ClusterError):
    """Input of another tool that lacks a fact about the cluster, which an option of `pipefit profile` gives."""


class ScheduleError(PipefitError):
    """A schedule that is wrong, or cannot be built for the request. The text draws the bad cell."""


class DeadlockError(ScheduleError):
    """A lowered schedule that would deadlock under rendezvous sends."""


class PlanError(PipefitError):
    """A plan that is malformed or contradicts itself."""


class StalePlanError(PlanError):
    """A plan made for another cluster or model than the present one."""


class DoesNotFitError(PlanError):
    """A plan that exceeds the memory of the devices, or a search in which every plan does."""


class DataError(PipefitError):
    """A corpus that is empty, unreadable, or different from its description."""


class CheckpointError(PipefitError):
    """A checkpoint that is incomplete, damaged, or of another model."""


class RunError(PipefitError):
    """A run that cannot start or had to stop: ranks that disagree, a rank that died, memory that ran out."""


class PluginError(PipefitError):
    """A plug-in of another package that cannot be loaded, or fails in a call."""


class LabError(PipefitError):
    """An emulated cluster that cannot be made on this machine, or whose measured speeds differ from the emulation."""


def most_like(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name closest to `name` in a list of one, or an empty list if none is similar."""
    import difflib

    return difflib.get_close_matches(name, list(known), n=1)


def suggest_name(name: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the next step after an unknown name: the closest known name, or `otherwise` if none is similar."""
    near = most_like(name, known)
    return f"did you mean {near[0]!r}?" if near else otherwise
