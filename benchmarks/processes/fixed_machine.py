"""The machine that plans of benchmarks are made for where `cluster.local` guesses the cluster. Shared by benchmarks.

A plan's order of transfers follows simulated times, and those the guessed figures: with the figures of whatever machine
runs the benchmark, a recorded result would be of other plans than those that are made again elsewhere.
"""

from __future__ import annotations

from pipefit.cluster import LocalMachine

FIXED_MACHINE = LocalMachine(cores=2, frequency_hz=2.6e9, memory_bytes=25276502016)
"""The one that results/memory_estimates.json was recorded on: all its plans are made again with these figures, some
with no other frequency."""
