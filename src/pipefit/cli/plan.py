"""`pipefit plan`: find the fastest plan that fits, and show why it won and its alternatives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pipefit.cli._options import takes_options
from pipefit.cli._plans import MEMORY_FLAGS
from pipefit.optimizers import DEFAULT as DEFAULT_OPTIMIZER

if TYPE_CHECKING:
    from pipefit.cli._progress import ProgressLines
    from pipefit.data.multimodal.feeds import SampleSource
    from pipefit.model.graph import Model
    from pipefit.plan.types import Job, Plan

BATCHES = 3
"""Number of global batches of an index that are planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `pipefit plan`."""

    model: str
    "A built-in name, a directory with config.json, a saved model (JSON), or FILE.py:FUNCTION."
    cluster: str | None = None
    "A cluster file, READER:FILE, 8xH100, or 2x8xA100-80:200Gbit/s."
    local: int | None = None
    "Plan for this many processes on this machine's CPU."
    calibration: Path | None = None
    "Factors on the cluster's data sheets, as `pipefit calibrate` writes them; same as FILE behind @ in --cluster."
    batch: int
    "Sequences of one step, over all devices."
    seq: int | None = None
    "Tokens of one sequence; captured models have their own."
    precision: str | None = None
    """bfloat16 (gradients in float32), bfloat16-gradients, fp8 (bfloat16 with the linear layers of blocks in FP8),
    fp8-bfloat16-gradients, float16, tf32, float32 or float64. Default: float32 with --local, else bfloat16."""
    seed: int = 0
    "Seed of the run: data order, first weights, dropout."
    top: int = 5
    "How many plans to list, the winner included."
    tolerance: str | None = None
    "Take the simplest plan that is at most this much slower than the fastest, such as 0.01 or 1%; 0: the fastest."
    fix: tuple[str, ...] = ()
    "Fix a choice, KEY=VALUE; repeatable: also dp, tp, pp, cp, ep, zero, fsdp, hsdp, sp, mbs. An unknown key lists all."
    memory_correction: Path | None = None
    "A memory correction, as `pipefit verify --record` writes it."
    max_oom_probability: float | None = None
    "With --memory-correction: largest probability that the plan does not fit. Default: 0.05."
    allow_other_environment: bool = False
    "Use a cluster that was measured with other software."
    quiet: bool = False
    "Print no progress on stderr."
    as_json: bool = False
    "Print the plan as JSON instead of tables."
    output: Path | None = None
    "Write the plan to this file."
    optimizer: str = DEFAULT_OPTIMIZER
    "The optimizer, from which memory follows; a wrong name lists them."
    lora: int = 0
    "Train low-rank adapters (LoRA) of this rank; the model itself is frozen."
    lora_alpha: float | None = None
    "With --lora: the adapters' products are multiplied by alpha / rank (see --rslora). Default: twice the rank."
    lora_targets: str = "all-linear"
    "With --lora: names of modules such as q_proj,v_proj; all-linear: every linear layer except the output head."
    lora_dropout: float = 0.0
    "With --lora: dropout of the adapters' inputs."
    rslora: bool = False
    "With --lora: multiply the adapters' products by alpha / sqrt(rank)."
    freeze: tuple[str, ...] = ()
    "Freeze the parameters whose names match this pattern, such as 'model.embed_tokens.*'; repeatable."
    documents: str = "joined"
    "Attention across documents packed into one sequence: joined, or apart."
    data: Path | None = None
    "For a model with images: an index from `pipefit data`, whose batches are planned for."
    held_out: float = 0.01
    "With --data, as for `pipefit train`: samples kept for evaluation."
    pack: bool = False
    "With --data, as for train: pack samples into a sequence."
    on_long: str = "fail"
    "With --data, as for train: fail or skip samples that are too long."


@takes_options(
    PlanOptions,
    flags={"output": ("--output", "-o"), **MEMORY_FLAGS},
)
def command(options: PlanOptions) -> None:
    """Find the fastest plan that fits MODEL on the cluster, and explain it. Ctrl-C gives the best plan so far."""
    from pipefit.cli._plans import INTERRUPTED_CODE
    from pipefit.cli._progress import ProgressLines

    try:
        with ProgressLines(quiet=options.quiet) as progress:
            searched = _search_plan(options, progress)
    except KeyboardInterrupt:
        print("interrupted: no plan found yet, nothing written", file=sys.stderr)
        raise SystemExit(INTERRUPTED_CODE) from None
    _print_plan(options, *searched)


def _search_plan(options: PlanOptions, progress: ProgressLines) -> tuple[Plan, Model, SampleSource | None]:
    """Return the plan, its model, and the source of its samples if there is one."""
    from pipefit.cli._plans import cluster_text, plan_maker
    from pipefit.cluster import open_cluster
    from pipefit.cluster.calibration import add_calibration
    from pipefit.codec import make_folder
    from pipefit.errors import PlanError
    from pipefit.model.registry import open_model
    from pipefit.plan.evaluate.simplicity import parse_tolerance
    from pipefit.plan.request.constraints import parse_constraints
    from pipefit.plan.request.sequence_length import resolve_length
    from pipefit.profile.environment import check_environment
    from pipefit.schedule.taskgraph.compile_notice import on_compilation

    if options.output is not None:
        make_folder(options.output, "plan", PlanError)
    text = cluster_text(options.cluster, options.local)
    if options.calibration is not None:
        text = add_calibration(text, options.calibration)
    opened_cluster = open_cluster(text)
    for difference in check_environment(opened_cluster, allow=options.allow_other_environment, hardware=False):
        print(f"measured with other software: {difference}", file=sys.stderr)
    constraints = parse_constraints(options.fix, options.batch)
    chosen = {} if options.tolerance is None else {"tolerance": parse_tolerance(options.tolerance)}
    opened_model = open_model(options.model, options.seq, _tuning_options(options))
    if chosen and len(opened_model.modules) > 1:
        raise PlanError(
            "A plan of several modules is the fastest: no order says which of them is simpler.",
            where="--tolerance",
            seen=options.tolerance,
            next_step="leave --tolerance out",
        )
    job = _build_job(options, resolve_length(opened_model, options.seq))
    make = plan_maker(options.memory_correction, options.max_oom_probability)
    source = None if options.data is None else _open_source(opened_model, options.data, job, options)
    if source is not None:
        make = partial(make, **_sampled_options(source, job))
    with on_compilation(progress.show_compilation):
        plan = make(
            opened_model,
            opened_cluster,
            job,
            constraints=constraints,
            top=options.top,
            name=options.model,
            cluster_source=text,
            progress=None if options.quiet else progress.show_report,
            keep_best=True,
            **chosen,
        )
    return plan, opened_model, source


def _print_plan(options: PlanOptions, plan: Plan, opened_model: Model, source: SampleSource | None) -> None:
    """Write the plan to its file, and print it."""
    from pipefit.cli._plans import print_tables
    from pipefit.codec import dump_text
    from pipefit.plan.check.rules import save_plan
    from pipefit.plan.evaluate.search_progress import INTERRUPTED
    from pipefit.plan.explain.text import forecast_lines, plan_headline, plan_tables
    from pipefit.plan.make import is_interrupted

    output = options.output
    if output is not None:
        save_plan(plan, output)
    if is_interrupted(plan):
        print(INTERRUPTED, file=sys.stderr if options.as_json else sys.stdout, flush=True)
    if options.as_json:
        sys.stdout.write(dump_text(plan))
        return
    print(plan_headline(plan))
    for line in forecast_lines(plan):
        print(line)
    if source is not None and plan.prediction is not None:
        print(_preparation_words(source, plan, opened_model, plan.prediction.step_s))
    print_tables(plan_tables(plan))
    _print_origins(plan)
    if output is not None:
        print(f"\nwritten to {output}")


def _open_source(opened: Model, data: Path, job: Job, options: PlanOptions) -> SampleSource:
    """Open the index with the rows that a run would draw from it."""
    from pipefit.data.multimodal.feeds import SampleSource
    from pipefit.data.multimodal.fits import check_index
    from pipefit.data.multimodal.index import open_index
    from pipefit.data.multimodal.sample_rows import rows_of_index
    from pipefit.errors import DataError, PlanError

    if len(opened.modules) < 2:
        raise PlanError(
            "Only a model with images can be planned for an index of samples.",
            where="--data",
            seen=f"a model of one module, {opened.modules[0].name!r}",
            next_step="leave --data out; `pipefit train` takes it",
        )
    if options.on_long not in ("fail", "skip"):
        raise DataError(
            "The treatment of samples that are too long is unknown.",
            where="--on-long",
            seen=repr(options.on_long),
            allowed="fail or skip",
        )
    index = open_index(data)
    rows = rows_of_index(
        index,
        job.sequence,
        batch=job.batch,
        held_out=options.held_out,
        pack=options.pack,
        on_long=options.on_long,  # type: ignore[arg-type]
        images=True,
    )
    check_index(opened, index, rows)
    return SampleSource(index=index, rows=rows, seed=job.seed)


def _sampled_options(source: SampleSource, job: Job) -> dict[str, Any]:
    """Return the planner's options for an index: its first global batches, and their arrangement in a run."""
    from pipefit.data.multimodal.planning import arranged_samples, sample_batches

    name = source.index.folder.name
    if source.rows.too_long:
        name += f", {source.rows.too_long} samples left out that are longer than the sequence"
    return {"samples": sample_batches(source.rows, job.batch, BATCHES, job.seed, name), "arrange": arranged_samples}


def _preparation_words(source: SampleSource, plan: Plan, model: Model, step_s: float) -> str:
    """Return the number of cores that prepare samples as fast as the plan's steps. Measured here, not part of the
    plan."""
    from pipefit.data.preparation.cores import cores_needed, decoding_copies, measured_rate

    rate = measured_rate(source.index)
    return cores_needed(source.index, source.rows, plan.job.batch, step_s, rate, decoding_copies(plan, model)).to_text()


def _tuning_options(options: PlanOptions) -> dict[str, Any]:
    """Return the configuration of adapters and frozen parameters. Raises ModelError for wrong options."""
    from pipefit.errors import ModelError
    from pipefit.model.adapters.options import ALL_LINEAR, AdapterConfig, check_adapters, tuned_config

    further = {
        "--lora-alpha": options.lora_alpha is not None,
        "--lora-targets": options.lora_targets != ALL_LINEAR,
        "--lora-dropout": options.lora_dropout != 0,
        "--rslora": options.rslora,
    }
    if options.lora == 0:
        for option, is_set in further.items():
            if is_set:
                raise ModelError("This option belongs to adapters.", where=option, next_step="add --lora 16")
        return tuned_config({}, None, options.freeze)
    adapters = AdapterConfig(
        rank=options.lora,
        alpha=2.0 * options.lora if options.lora_alpha is None else options.lora_alpha,
        dropout=options.lora_dropout,
        targets=tuple(target.strip() for target in options.lora_targets.split(",")),
        rslora=options.rslora,
    )
    return tuned_config({}, check_adapters(adapters), options.freeze)


def _build_job(options: PlanOptions, sequence: int) -> Job:
    from pipefit.codec import from_data
    from pipefit.errors import PlanError
    from pipefit.optimizers import find_optimizer
    from pipefit.plan.types import Documents, Job

    for name, value in (("--batch", options.batch), ("--seq", sequence)):
        if value < 1:
            raise PlanError("A whole number above zero is needed.", where=name, seen=value)
    if options.documents not in get_args(Documents):
        raise PlanError(
            "Documents are joined or kept apart.", where="--documents", seen=options.documents, allowed="joined, apart"
        )
    data = {
        "batch": options.batch,
        "sequence": sequence,
        "precision": options.precision or ("float32" if options.local else "bfloat16"),
        "seed": options.seed,
        "documents": options.documents,
        "optimizer": find_optimizer(options.optimizer, "--optimizer").name,
    }
    return from_data(Job, data, "--precision")


def _print_origins(plan: Plan) -> None:
    if plan.prediction is not None:
        print("\nfigures come from:")
        for note in plan.prediction.assumptions:
            print(f"  - {note}")
