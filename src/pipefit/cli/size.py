"""`pipefit size`: the devices that a training needs, by days, cost and MFU over cluster sizes and kinds of devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli._options import takes_options
from pipefit.optimizers import DEFAULT as DEFAULT_OPTIMIZER

if TYPE_CHECKING:
    from pipefit.cli._progress import ProgressLines
    from pipefit.plan.sizing.request import SizingRequest
    from pipefit.plan.sizing.sizes import SizedTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """Options of `pipefit size`."""

    model: str
    "A built-in name, a directory with config.json, a saved model (JSON), or FILE.py:FUNCTION."
    tokens: str
    "Tokens of the whole training, such as 1.5T."
    batch: str
    "Tokens of one step over all devices, such as 4M."
    seq: int | None = None
    "Tokens of one sequence; captured models have their own."
    devices: str = "H100"
    "Kinds of devices, such as H100,A100-80,MI300X; `pipefit devices` lists them."
    max_gpus: int = 512
    "Devices of the largest cluster."
    network: str = ""
    "Network cards of every host, such as 8x400Gbit/s. Default: those of the device's usual host."
    deadline: str | None = None
    "Time for the whole training, such as 30d."
    prices: Path | None = None
    "A CSV file with the columns device and price (of one device for an hour)."
    precision: str = "bfloat16"
    """bfloat16 (gradients in float32), bfloat16-gradients, fp8 (bfloat16 with the linear layers of blocks in FP8),
    fp8-bfloat16-gradients, float16, tf32, float32 or float64."""
    optimizer: str = DEFAULT_OPTIMIZER
    "The optimizer, from which memory follows; a wrong name lists them."
    fix: tuple[str, ...] = ()
    "Fix a choice on every cluster, as for `pipefit plan`; repeatable."
    quiet: bool = False
    "Print no progress on stderr."
    as_json: bool = False
    "Print the figures as JSON instead of tables."
    output: Path | None = None
    "Write an HTML page with a curve to this file."


@takes_options(SizeOptions, flags={"output": ("--output", "-o")})
def command(options: SizeOptions) -> None:
    """Plan a training on clusters of growing size, and say which is the smallest, the cheapest and the fastest. Exit
    code 1 if it fits on none."""
    from pipefit.cli._plans import INTERRUPTED_CODE
    from pipefit.cli._progress import ProgressLines

    with ProgressLines(quiet=options.quiet) as progress:
        request = _read_request(options)
        trainings, finished = _plan_sizes(options, request, progress)
    if not finished:
        print("interrupted: the sizes so far", file=sys.stderr)
    _print_sizes(options, request, trainings)
    if not finished:
        raise SystemExit(INTERRUPTED_CODE)
    if not any(training.days for training in trainings):
        raise SystemExit(1)


def _read_request(options: SizeOptions) -> SizingRequest:
    """Return the request of the options. Raises PipefitError for wrong ones, before anything is planned."""
    from pipefit.cluster.catalogue import find_sheet, network_bandwidth
    from pipefit.codec import from_data, make_folder
    from pipefit.errors import PlanError
    from pipefit.model.registry import open_model
    from pipefit.optimizers import find_optimizer
    from pipefit.plan.request.sequence_length import resolve_length
    from pipefit.plan.sizing.request import SizingRequest, check_prices, read_prices, step_rows
    from pipefit.plan.types import Job
    from pipefit.units import parse_count, parse_seconds

    tokens, batch = parse_count(options.tokens, "--tokens"), parse_count(options.batch, "--batch")
    deadline_s = None if options.deadline is None else parse_seconds(options.deadline, "--deadline")
    numbers = {"--tokens": tokens, "--batch": batch, "--max-gpus": options.max_gpus, "--deadline": deadline_s}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise PlanError("A number above zero is needed.", where=name, seen=value)
    if options.network:
        network_bandwidth(options.network, "--network")
    devices = tuple(dict.fromkeys(find_sheet(name.strip(), "--devices").name for name in options.devices.split(",")))
    prices = None if options.prices is None else read_prices(options.prices)
    if prices is not None:
        check_prices(devices, prices, str(options.prices))
    if options.output is not None:
        make_folder(options.output, "page", PlanError)
    opened_model = open_model(options.model, options.seq)
    sequence = resolve_length(opened_model, options.seq)
    job = {
        "batch": step_rows(batch, sequence),
        "sequence": sequence,
        "precision": options.precision,
        "optimizer": find_optimizer(options.optimizer, "--optimizer").name,
    }
    return SizingRequest(
        name=options.model,
        model=opened_model,
        job=from_data(Job, job, "--precision"),
        tokens=tokens,
        devices=devices,
        max_devices=options.max_gpus,
        network=options.network,
        deadline_s=deadline_s,
        prices=prices,
    )


def _plan_sizes(
    options: SizeOptions, request: SizingRequest, progress: ProgressLines
) -> tuple[list[SizedTraining], bool]:
    """Return the trainings, and whether all sizes were planned: Ctrl-C ends with those so far."""
    from pipefit.plan.request.constraints import parse_constraints
    from pipefit.plan.sizing.sizes import size_trainings
    from pipefit.schedule.taskgraph.compile_notice import on_compilation

    trainings: list[SizedTraining] = []
    constraints = parse_constraints(options.fix, request.job.batch)
    observer = None if options.quiet else progress.show_report
    try:
        with on_compilation(progress.show_compilation):
            for training in size_trainings(request, constraints, observer):
                trainings.append(training)
                progress.show_text(f"{training.size.cluster}: {_days_words(training)}")
    except KeyboardInterrupt:
        return trainings, False
    return trainings, True


def _days_words(training: SizedTraining) -> str:
    from pipefit.plan.sizing.text import format_days

    return training.layout if training.days is None else format_days(training.days)


def _print_sizes(options: SizeOptions, request: SizingRequest, trainings: Sequence[SizedTraining]) -> None:
    from pipefit.cli._plans import print_tables
    from pipefit.codec import write_file
    from pipefit.plan.sizing.sizes import sizing_data
    from pipefit.plan.sizing.text import answer_lines, size_headline, size_table
    from pipefit.show.size_page import render_sizes

    if options.output is not None:
        write_file(options.output, render_sizes(request, trainings), "page")
    if options.as_json:
        print(json.dumps(sizing_data(request, trainings), indent=1))
        return
    print(size_headline(request))
    for line in answer_lines(request, trainings):
        print(line)
    print_tables([size_table(request, trainings)])
    if options.output is not None:
        print(f"\nwritten to {options.output}")
