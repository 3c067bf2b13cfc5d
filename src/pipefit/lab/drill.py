"""The process that each device runs for the check of its pace: actions with a little real work, timed by its hidden
table."""

from __future__ import annotations

import sys
import time

from pipefit.lab.pace import emulated_device
from pipefit.lab.tables import LayerFacts

ACTION_S = 0.05
"""Approximate emulated duration of an action."""

WORK_S = 1e-3
"""Processor time of the real work in each action."""


def main(actions: int) -> None:
    """Run this many actions. The counts are written at exit, as in every paced process."""
    emulated = emulated_device()
    assert emulated is not None, "started outside a lab, or on a kind of device without a table"
    rate = emulated.operator_rates()[0]
    work = LayerFacts(dense_flops=ACTION_S * rate, attention_flops=0.0, traffic_bytes=0.0, tokens=8192, context=1)
    seconds = emulated.table.layer_time_s("F", {"F": work})
    emulated.begin_step()
    for _ in range(actions):
        began = emulated.begin_action()
        busy_until = time.thread_time() + WORK_S
        while time.thread_time() < busy_until:
            pass
        taken_s = seconds * emulated.draw_factor()
        emulated.finish_action(began + taken_s, taken_s, 0.0, warm=False)


if __name__ == "__main__":
    main(int(sys.argv[1]))
