"""The CSV of every family on PyTorch's own pipelining runtime: the same loss and gradients as one process.

Nothing of ours runs in the processes but the CSV: stages, transfers and backward passes are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tests.support import stock_runtime  # noqa: E402
from tests.support.pool import Pool  # noqa: E402

from pipefit.schedule import FAMILIES, ScheduleProblem  # noqa: E402
from pipefit.schedule.text.csv_io import to_csv  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

DEVICES = 4


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    """Four gloo processes for all families."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(getattr(schedules, "_PipelineScheduleRuntime", None), "_load_csv"):
        pytest.skip("this torch has no _PipelineScheduleRuntime that reads CSV")
    pool = Pool(DEVICES)
    yield pool
    pool.close()


@pytest.mark.parametrize("microbatches", [8, 12])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_stock_pytorch_runs_our_csv(world: Pool, name: str, microbatches: int) -> None:
    made = FAMILIES[name]
    placement = made.placement(DEVICES)
    text = to_csv(made(ScheduleProblem(placement=placement, microbatches=microbatches)))
    wanted_loss, wanted = stock_runtime.in_one_process()
    found: dict[str, torch.Tensor] = {}
    losses = []
    for loss, gradients in world.run(stock_runtime.run_csv, text, placement, microbatches, ranks=DEVICES):
        losses += [loss] if loss is not None else []
        found |= gradients
    assert losses == [pytest.approx(wanted_loss, rel=1e-13)]
    assert set(found) == set(wanted)
    for parameter, gradient in wanted.items():
        error = (found[parameter] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-12, f"{parameter}: {error:.3g}"
