"""`pipefit lab`: a cluster of network namespaces on this machine, with shaped links and paced devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipefit.cli._options import takes_options
from pipefit.errors import LabError

ACTIONS = ("up", "run", "down", "check")

LOADED = ("pipefit.run.session.launch", "pipefit.run.session.train", "pipefit.profile.session")
"""Modules of `pipefit train` and `pipefit profile` that are imported once for all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """Options of `pipefit lab`."""

    action: str
    "What to do."
    file: Path
    "A lab file, or a cluster file."
    words: tuple[str, ...] = ()
    "run: the command of every device."
    devices: str = ""
    "run: only on these devices, for example 0-3,6."
    plan: Path | None = None
    "run: only on the devices of this plan."
    as_json: bool = False
    "check: print the measurements as JSON."


@takes_options(
    LabOptions,
    arguments=("action", "file", "words"),
    metavars={"action": "|".join(ACTIONS), "file": "CLUSTER_FILE", "words": "-- COMMAND"},
)
def command(options: LabOptions) -> None:
    """Emulate the cluster of CLUSTER_FILE on this machine (needs root and iproute2).

    `up` creates the lab and describes it. `run` starts COMMAND on every device as torchrun would; a
    missing lab is created first and removed at the end. `down` removes the lab in any state. `check` measures every
    link and the pace of every device against the file.
    """
    action, file = options.action, options.file
    if action not in ACTIONS:
        raise LabError(
            "The lab command has no such action.", where="pipefit lab", seen=action, allowed=", ".join(ACTIONS)
        )
    if action != "run" and (options.words or options.devices or options.plan):
        raise LabError("Only `run` takes a command and devices.", where=f"pipefit lab {action}")
    from pipefit.lab.lifecycle import StopSignal

    try:
        if action == "run":
            code = _run_words(file, options.words, options.devices, options.plan)
        elif action == "check":
            code = _check_lab(file, options.as_json)
        else:
            code = _bring_up(file) if action == "up" else _take_down(file)
    except StopSignal as stopped:
        code = 128 + stopped.number
    if code:
        sys.exit(code)


def _bring_up(file: Path) -> int:
    from pipefit.lab import lifecycle

    lab = lifecycle.Lab.open_lab(file)
    lifecycle.bring_up(lab)
    for line in lifecycle.describe_lab(lab):
        print(line)
    return 0


def _take_down(file: Path) -> int:
    from pipefit.lab import lifecycle

    removed = lifecycle.take_down(file)
    print(f"removed {len(removed)} namespaces" if removed else "no lab was up")
    return 0


def _run_words(file: Path, words: Sequence[str], devices: str, plan: Path | None) -> int:
    from pipefit.lab import lifecycle
    from pipefit.lab.launch import PRELOAD, run_judged

    lab = lifecycle.Lab.open_lab(file)
    chosen = _parse_devices(devices, plan)
    preload = (*PRELOAD, *(LOADED if words[:1] == ("pipefit",) else ()))
    with lifecycle.hold_lab(lab):
        result = run_judged(lab, words, devices=chosen, preload=preload, say=lambda line: print(line, flush=True))
    if result.pace:
        print(f"lab: {'valid' if result.valid else 'INVALID'}: {result.pace}", file=sys.stderr)
    return result.code


def _check_lab(file: Path, as_json: bool) -> int:
    from pipefit.lab import check, lifecycle

    lab = lifecycle.Lab.open_lab(file)
    with lifecycle.hold_lab(lab):
        result = check.calibrate_lab(lab, show=lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(check.as_data(lab, result), indent=1))
    else:
        print("\n".join(check.as_lines(lab, result)))
    return 0 if result.is_good else 1


def _parse_devices(text: str, plan: Path | None) -> list[int]:
    if plan is not None:
        from pipefit.plan.check.rules import load_plan

        return list(load_plan(plan).used_devices)
    chosen: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise LabError(
                "The list of devices is invalid.", where="--devices", seen=text, allowed="numbers and runs: 0-3,6"
            )
        chosen += range(int(first), int(last or first) + 1)
    return chosen
