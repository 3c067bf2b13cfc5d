"""Ratios of paired step times, against a t-test of scipy on the same pairs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.processes.ratios import paired_ratio


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    random = np.random.default_rng(7)
    base = np.exp(random.normal(0.0, 0.3, 12))
    other = base * np.exp(random.normal(0.1, 0.05, 12))
    ratio, interval = paired_ratio(base.tolist(), other.tolist())
    test = stats.ttest_rel(np.log(other), np.log(base))
    low, high = test.confidence_interval(0.95)
    assert ratio == pytest.approx(stats.gmean(other / base))
    assert interval == pytest.approx(np.exp([low, high]))


def test_a_slow_moment_of_the_machine_cancels_in_its_pair() -> None:
    ratio, interval = paired_ratio([1.0, 5.0, 1.0, 1.0], [1.2, 6.0, 1.2, 1.2])
    assert ratio == pytest.approx(1.2) and interval == pytest.approx([1.2, 1.2])


def test_all_times_have_a_partner() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])
