"""Schedules fitted to true times and to the memory of every lane."""

from pipefit.schedule.fit.instance import Instance
from pipefit.schedule.fit.result import Fit
from pipefit.schedule.fit.search import fit

__all__ = ["Fit", "Instance", "fit"]
