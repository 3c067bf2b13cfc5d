"""What would happen: a timeline and a memory curve from a schedule and costs."""

from pipefit.simulate.timeline import Timeline, TimelineSpan, simulate_schedule

__all__ = ["Timeline", "TimelineSpan", "simulate_schedule"]
