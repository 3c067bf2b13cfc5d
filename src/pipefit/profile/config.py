"""The configuration of a profile. Its fields are options of `pipefit profile`, and the strings below them their help.

This module imports no other one of `profile/`, so that the command line starts without numpy and torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TINY = 8
"""Bytes of the answer to every message, and of the smallest message: its round trip is two latencies."""

SIZES = (TINY, 16 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20)
"""Sizes in bytes of the measured messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """The scope and thoroughness of a profile."""

    output: Path = Path("cluster.json")
    "The cluster file to write."
    models: tuple[str, ...] = ()
    "Measure the layers of this model too; repeatable. A name or directory."
    sequence: int = 1024
    "Tokens of the longest sequence that layers are measured at."
    tokens: int = 0
    "Tokens of the largest microbatch on one device; 0: eight sequences."
    dtype: str = ""
    "Dtype of the layers: float32, tf32, bfloat16, float64 or fp8. Default: by device."
    name: str = ""
    "Name of the cluster. Default: the name of the file."
    rails: int = 1
    "Networks between the hosts; a host's devices use them in turn."
    layer_rounds: int = 5
    "Repetitions of every measured layer."
    link_rounds: int = 3
    "Repetitions of every measured link."
    host_rounds: str = "auto"
    "Rounds of host pairs: a number, all, or auto: until the rest can be inferred from the measured links."
    sizes_bytes: tuple[int, ...] = SIZES
    "Sizes in bytes of the measured messages."
    only: str = ""
    "links: measure neither layers nor collectives."
    device: str = "auto"
    "auto, cpu or cuda."
    timeout_s: float = 60.0
    "Seconds without an answer after which a host has failed."
