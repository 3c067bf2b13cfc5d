"""Simulation of one training iteration: a timeline and a memory curve from a schedule and its costs."""

from pipefit.simulate.timeline import Timeline, TimelineSpan, simulate_schedule

__all__ = ["Timeline", "TimelineSpan", "simulate_schedule"]
