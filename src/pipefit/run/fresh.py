"""Whether the cluster that a plan was made for still is what it was, looked at before a run starts.

Clusters of this machine (`local:N`) are not compared: their figures are guesses that follow the clock and the memory
limit of the moment, and a plan for N processes runs wherever N processes can be started.
"""

from __future__ import annotations

from pathlib import Path

from pipefit.cluster import LOCAL, Cluster, looks_like_spec, open_cluster
from pipefit.errors import StalePlanError
from pipefit.plan.check import check_fresh
from pipefit.plan.types import Plan


def check_cluster(plan: Plan, plan_file: str | Path, named: str = "") -> Cluster | None:
    """The cluster that stands now, if it is the one of the plan; None where there is nothing to compare.

    `named` is what the user gives instead of the plan's own name for it. Looked for are that name, and a file of that
    name beside the plan. Raises StalePlanError where the cluster changed, or its file is not to be found;
    FormatError or ClusterError where it cannot be read.
    """
    text = named or plan.cluster
    if not text or not plan.hashes.cluster:
        return None
    if text.startswith(LOCAL):
        return open_cluster(text)
    if not looks_like_spec(text) and not Path(text).exists():
        beside = Path(plan_file).parent / Path(text).name
        if named or not beside.exists():
            raise StalePlanError(
                "The cluster file of the plan is not here, so nobody can say whether it is still the same cluster.",
                where="--cluster" if named else "cluster",
                seen=text if named else f"{text}, and no {Path(text).name} beside the plan",
                next_step="pass the file with --cluster FILE, or put it beside the plan, or make the plan again",
            )
        text = str(beside)
    cluster = open_cluster(text)
    check_fresh(plan, cluster=cluster)
    return cluster
