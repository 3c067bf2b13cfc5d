"""What would happen: a timeline and a memory curve from a schedule and costs."""

from pipefit.simulate.timeline import Span, Timeline, simulate

__all__ = ["Span", "Timeline", "simulate"]
