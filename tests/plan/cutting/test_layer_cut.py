"""The best cut with remembered balances is the one without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipefit.plan.cutting.layer_cut import Balance, best_cut
from pipefit.plan.cutting.rows import LayerRow
from pipefit.schedule import FAMILIES


def test_rows_that_differ_in_memory_share_a_balance() -> None:
    random = np.random.default_rng(0)
    balances: dict[object, Balance] = {}
    cuts = 0
    for layers, lanes in ((9, 2), (14, 4), (24, 3)):
        figures = random.uniform(0.5, 2.0, (6, layers))
        row = LayerRow(*figures, passing_bytes=0.1, limit_bytes=0.0, layers=())
        placement = FAMILIES["zb-v"].placement(lanes)
        for limit in random.uniform(2.0, 60.0, 12):
            lean = replace(row, limit_bytes=float(limit), static_bytes=random.uniform(0.0, 1.0, layers))
            rows, held = [lean] * len(placement), tuple(random.integers(2, 2 * lanes + 2, lanes).tolist())
            cut = best_cut(rows, held, placement, (), balances)
            assert cut == best_cut(rows, held, placement, ())
            cuts += cut is not None
    assert len(balances) <= 3 < cuts
