"""`pipefit explain`: show the decisions and the prediction of a plan, and why the alternatives lost."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.cli._options import takes_options
from pipefit.cli._plans import MEMORY_FLAGS

if TYPE_CHECKING:
    from pipefit.cli._progress import ProgressLines
    from pipefit.cluster import Cluster
    from pipefit.model.graph import Model
    from pipefit.plan.request.constraints import Constraints
    from pipefit.plan.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of `pipefit explain`."""

    path: Path
    "A plan file."
    why_not: str | None = None
    'Plan another layout, such as "tp=8 pp=4" (keys of --fix), and show where its time goes against this plan.'
    model: str | None = None
    "With --why-not: the model, if it is not found under its name in the plan."
    cluster: str | None = None
    "With --why-not: the cluster, if it is not found under its name in the plan."
    local: int | None = None
    "With --why-not: the cluster, as this many processes on this machine's CPU."
    memory_correction: Path | None = None
    "With --why-not: the memory correction of the plan, as for `pipefit plan`."
    max_oom_probability: float | None = None
    "With --why-not and --memory-correction: as for `pipefit plan`."
    quiet: bool = False
    "Print no progress on stderr."
    as_json: bool = False
    "Print the tables as JSON."


@takes_options(
    ExplainOptions,
    arguments=("path",),
    metavars={"path": "PLAN"},
    flags=MEMORY_FLAGS,
)
def command(options: ExplainOptions) -> None:
    """Explain PLAN: decisions, stages, memory, lower bound, bottleneck, alternatives. Or compare it with another
    layout."""
    from pipefit.plan.check.rules import load_plan

    _check_options(options)
    plan = load_plan(options.path)
    if options.why_not is not None:
        _explain_layout(options, options.why_not, plan)
    else:
        _explain_plan(options, plan)


def _check_options(options: ExplainOptions) -> None:
    """Raise PlanError for options that need --why-not."""
    from pipefit.errors import PlanError

    for name in ("model", "cluster", "local", "memory_correction", "max_oom_probability"):
        option = "--" + name.replace("_", "-")
        if options.why_not is None and getattr(options, name) is not None:
            raise PlanError(
                "This option is for another layout to compare the plan with, and none is named.",
                where=option,
                seen=getattr(options, name),
                next_step=f'add --why-not "tp=8 pp=4", or leave {option} out',
            )


def _explain_plan(options: ExplainOptions, plan: Plan) -> None:
    from pipefit.cli._plans import print_tables
    from pipefit.plan.explain.text import forecast_lines, plan_headline, plan_tables

    notes = list(plan.prediction.assumptions) if plan.prediction else []
    if options.as_json:
        _print_json(
            {
                "headline": plan_headline(plan),
                "forecast": forecast_lines(plan),
                "tables": {
                    table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                    for table in plan_tables(plan)
                },
                "figures come from": notes,
            }
        )
        return
    print(plan_headline(plan))
    for line in forecast_lines(plan):
        print(line)
    print_tables(plan_tables(plan))
    if notes:
        print("\nfigures come from:")
        for note in notes:
            print(f"  - {note}")


def _explain_layout(options: ExplainOptions, words: str, plan: Plan) -> None:
    """Plan the layout, and print it beside the plan. A layout that does not fit is an answer, not an error."""
    from pipefit.cli._plans import INTERRUPTED_CODE, open_subject, print_tables
    from pipefit.cli._progress import ProgressLines
    from pipefit.errors import DoesNotFitError, PlanError
    from pipefit.plan.explain.text import plan_headline
    from pipefit.plan.explain.why_not import (
        compare_layouts,
        comparison_data,
        comparison_tables,
        explain_difference,
        explain_misfit,
        misfit_data,
        parse_layout,
        rename_option,
    )

    layout = parse_layout(words, plan.job.batch)  # a mistake in the words is told before anything is opened
    try:
        with ProgressLines(quiet=options.quiet) as progress:
            subject = open_subject(plan, options.model, options.cluster, options.local)
            asked = _plan_layout(options, layout, plan, subject, progress)
    except KeyboardInterrupt:
        print("interrupted: the layout is not planned", file=sys.stderr)
        raise SystemExit(INTERRUPTED_CODE) from None
    except PlanError as error:
        renamed = rename_option(error)
        if not isinstance(renamed, DoesNotFitError):
            raise renamed from None
        if options.as_json:
            _print_json(misfit_data(words, renamed))
        else:
            print(explain_misfit(words, renamed))
        return
    comparison = compare_layouts(words, plan, asked, *subject)
    if options.as_json:
        _print_json(comparison_data(comparison))
        return
    print(plan_headline(plan))
    print(explain_difference(comparison))
    if plan.prediction is not None and plan.prediction.risk is not None and options.memory_correction is None:
        print("The plan was made with a memory correction, the layout without one: add --memory-correction FILE.")
    print_tables(comparison_tables(comparison))
    print("\nThe planner chose everything that the layout does not fix.")


def _plan_layout(
    options: ExplainOptions, layout: Constraints, plan: Plan, subject: tuple[Model, Cluster], progress: ProgressLines
) -> Plan:
    """Return the best plan with this layout for the plan's job, on the batch that the plan was simulated on."""
    from pipefit.cli._plans import plan_maker
    from pipefit.data.multimodal.planning import arranged_samples
    from pipefit.plan.explain.why_not import samples_of_plan
    from pipefit.schedule.taskgraph.compile_notice import on_compilation

    samples = samples_of_plan(plan)
    sampled = {} if samples is None else {"samples": samples, "arrange": arranged_samples}
    with on_compilation(progress.show_compilation):
        return plan_maker(options.memory_correction, options.max_oom_probability)(
            *subject,
            plan.job,
            constraints=layout,
            top=1,
            name=plan.model.name,
            cluster_source=plan.cluster,
            progress=None if options.quiet else progress.show_report,
            **sampled,
        )


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts, indent=1) + "\n")
