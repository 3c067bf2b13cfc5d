"""Ratios of step times that were measured in pairs, one side right after the other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def paired_ratio(base_s: Sequence[float], other_s: Sequence[float]) -> tuple[float, list[float]]:
    """Return the mean ratio of the other side's times over the base's, and its 95 % confidence interval.

    The interval is Student's t on the logarithms of the pairs' ratios.
    """
    from scipy.stats import t

    logs = [math.log(other / base) for base, other in zip(base_s, other_s, strict=True)]
    mean, spread = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(t.ppf(0.975, len(logs) - 1)) * spread
    return math.exp(mean), [math.exp(mean - reach), math.exp(mean + reach)]
