"""Curves: fits of functions of another form, predictions, signatures, and measured costs behind the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.cluster import local_cluster
from pipefit.cluster.measured import ActionCurve, ClusterMeasurements, CollectiveCurve, LayerCurve, LinkCurve, RailCurve
from pipefit.cluster.spec import uniform_rail
from pipefit.cluster.types import Cluster
from pipefit.codec import dump_text, load_text
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute import curves
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.profile.fit import fit_action, fit_layer
from pipefit.profile.points import MOST_POINTS, WorkPoint, attention_points, first_points, refine_points, token_counts

Truth = Callable[..., float]


def layer_graph(prefix: str = "", width: int = 8, source: str = "") -> Graph:
    """x -> linear -> attention on itself -> x, with names that may differ."""
    x, h, o = f"{prefix}x", f"{prefix}h", f"{prefix}o"
    heads = TensorSpec(name=f"{prefix}r", shape=("B", "T", 2, width // 2))
    return Graph(
        inputs=(TensorSpec(name=x, shape=("B", "T", width)),),
        outputs=(f"{prefix}y",),
        operators=(
            Operator(kind="linear", inputs=(x, f"{prefix}w", ""), outputs=(h,), source=source),
            Operator(
                kind="reshape", inputs=(h,), outputs=(heads.name,), attributes={"shape": ["B", "T", 2, width // 2]}
            ),
            Operator(
                kind="attention",
                inputs=(heads.name, heads.name, heads.name),
                outputs=(o,),
                attributes={"causal": True, "scale": 0.5, "window": None},
            ),
            Operator(kind="reshape", inputs=(o,), outputs=(f"{prefix}y",), attributes={"shape": ["B", "T", width]}),
        ),
        parameters=(ParameterSpec(name=f"{prefix}w", shape=(width, width)),),
        tensors=(
            TensorSpec(name=h, shape=("B", "T", width)),
            heads,
            TensorSpec(name=o, shape=heads.shape),
            TensorSpec(name=f"{prefix}y", shape=("B", "T", width)),
        ),
    )


def smooth_knee(rows: int, tokens: int, past: int, earlier: int = 1) -> float:
    """A GPU: flat, then linear, rounded at the knee; attention in tiles of 32 queries by 64 keys."""
    count = rows * tokens
    linear = (1.4e-3**4 + (2.6e-6 * count) ** 4) ** 0.25
    queries, keys = np.ceil(tokens / 32) * 32, np.ceil((past + tokens / 2) / 64) * 64
    return float(linear + rows * queries * keys * 4e-10 + (2e-5 if past else 0.0))


def cache_steps(rows: int, tokens: int, past: int, earlier: int = 1) -> float:
    """A CPU: a smooth growth of the cost of a token as it leaves the caches; the mask's rectangle with context."""
    count = rows * tokens
    linear = 5e-5 + count * 8e-6 * (1 + 0.25 * count / (count + 700))
    scores = tokens * tokens / 2 if not past else tokens * (past + tokens) * 1.15
    return float(linear + rows * scores * 1.1e-8 + tokens * (past + tokens) * 2e-9 * (past > 0))


def no_attention(rows: int, tokens: int, past: int, earlier: int = 1) -> float:
    count = rows * tokens
    return 3e-5 + 4e-7 * count + 1e-5 * np.log1p(count / 50)


def measured_points(
    truth: Truth, attention: bool, sequence: int = 1024, most: int = 4096
) -> tuple[list[WorkPoint], list[float]]:
    graph = layer_graph()
    if not attention:
        graph = Graph(
            inputs=graph.inputs,
            outputs=("h",),
            operators=graph.operators[:1],
            parameters=graph.parameters,
            tensors=graph.tensors[:1],
        )
    points = first_points(graph, sequence, most)
    points += refine_points(points, [truth(*point) for point in points], sequence)
    return points, [truth(*point) for point in points]


@pytest.mark.parametrize("truth", [smooth_knee, cache_steps])
def test_unseen_points_of_another_functional_form_within_five_percent(truth: Truth) -> None:
    points, seconds = measured_points(truth, attention=True)
    assert len(points) <= MOST_POINTS
    curve = fit_action(points, seconds, attention=True)
    draw = np.random.default_rng(0)
    for _ in range(200):
        tokens = int(draw.integers(64, 1025))
        rows = int(draw.integers(1, max(2, 4096 // tokens)))
        past = int(draw.integers(64, 1025 - tokens)) if tokens < 900 and draw.random() < 0.6 else 0
        predicted = curves.action_time_s(curve, rows, tokens, past)
        assert predicted == pytest.approx(truth(rows, tokens, past), rel=0.05), (rows, tokens, past)


def test_slices_below_the_knee_do_not_bend_the_curve_above_it() -> None:
    """The rate saturates along a Hill curve with its knee at 8 tokens: slices of 3 and 6 tokens take as long as 10, and
    no row without context is so short."""

    def early_knee(rows: int, tokens: int, past: int, earlier: int = 1) -> float:
        count = rows * tokens
        return 2.5e-3 * count * (1 + (8 / count) ** 1.2) + 1e-5 * count * (past + tokens / 2)

    points = [
        p for p in measured_points(early_knee, attention=True, sequence=48, most=96)[0] if p.past or p.tokens > 12
    ]
    assert min(p.rows * p.tokens for p in points) < 4
    curve = fit_action(points, [early_knee(*point) for point in points], attention=True)
    for rows, tokens, past in ((2, 48, 0), (1, 13, 0), (1, 16, 0), (1, 40, 0), (2, 24, 24), (1, 6, 36), (1, 3, 45)):
        predicted = curves.action_time_s(curve, rows, tokens, past)
        assert predicted == pytest.approx(early_knee(rows, tokens, past), rel=0.03), (rows, tokens, past)


def test_a_layer_without_attention_needs_few_points() -> None:
    points, seconds = measured_points(no_attention, attention=False)
    assert len(points) <= 24
    curve = fit_action(points, seconds, attention=False)
    assert curve.attention_s == ()
    for count in (20, 77, 300, 1111, 4000):
        assert curves.action_time_s(curve, 1, count) == pytest.approx(no_attention(1, count, 0), rel=0.05)


def test_noise_of_three_percent_does_not_break_the_fit() -> None:
    points, seconds = measured_points(cache_steps, attention=True)
    draw = np.random.default_rng(1)
    noisy = [time_s * (1 + 0.03 * draw.random()) for time_s in seconds]
    times = [dict.fromkeys("FIWB", time_s) for time_s in noisy]
    found, worst = fit_layer(points, times, attention=True)
    assert worst < 0.04
    errors = [
        abs(curves.action_time_s(found["B"], 3, tokens, past) / cache_steps(3, tokens, past) - 1)
        for tokens, past in ((128, 0), (300, 0), (700, 0), (128, 512), (200, 300), (512, 500))
    ]
    assert max(errors) < 0.06


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-5, 1e-2), min_size=6, max_size=6), st.integers(1, 4000), st.integers(1, 4000))
def test_a_fitted_curve_never_falls_with_more_tokens(seconds: list[float], a: int, b: int) -> None:
    points = [WorkPoint(1, count) for count in (16, 64, 256, 512, 1024, 2048)]
    curve = fit_action(points, seconds, attention=False)
    low, high = sorted((a, b))
    assert curves.action_time_s(curve, 1, low) <= curves.action_time_s(curve, 1, high) * (1 + 1e-9)


def test_small_microbatches_are_measured_down_to_a_part_of_short_sequences() -> None:
    """Of images of few tokens a microbatch may have less than the shortest of 16 tokens; longer ones are not tried."""
    assert token_counts(96, 48) == [3, 6, 12, 24, 48, 96]
    assert token_counts(1024, 256)[0] == token_counts(1 << 16, 4096)[0] == 16 and token_counts(8, 8)[0] == 1


def test_points_are_fewer_than_forty_for_any_size() -> None:
    for sequence, most in ((16, 16), (64, 64), (256, 2048), (4096, 65536), (131072, 524288)):
        points = first_points(layer_graph(), sequence, most)
        points += refine_points(points, [smooth_knee(*point) for point in points], sequence)
        assert len(points) < 40
        assert all(p.rows >= 1 and p.tokens >= 1 and p.past + p.tokens <= sequence for p in points)


def test_slices_are_measured_with_few_and_many_rows_and_within_reason() -> None:
    points = attention_points(256, 1024)
    sliced = [point for point in points if point.past]
    assert {1, 4, 16} < {point.rows for point in sliced} and len(sliced) > 20
    assert all(point.rows * (point.tokens + point.past) <= 2 * 1024 for point in sliced)
    assert {point.earlier for point in sliced if point.rows > 4} >= {1, 4, 6, 8}
    for sequence, most in ((256, 1024), (131072, 524288), (64, 64)):
        assert len(first_points(layer_graph(), sequence, most)) <= MOST_POINTS - 4, "room for the knee"


def test_a_round_number_that_is_fast_by_luck_does_not_bend_the_curve() -> None:
    """Knots are powers of two, where kernels may be faster than everywhere else."""

    def lucky(rows: int, tokens: int, past: int, earlier: int = 1) -> float:
        count = rows * tokens
        return (4e-5 + 4e-6 * count) * (0.975 if count & (count - 1) == 0 else 1.0) + 1e-9 * count * (past + tokens / 2)

    curve = fit_action(*measured_points(lucky, attention=True, sequence=256, most=1024), attention=True)
    assert len(curve.tokens) == 2
    for rows, tokens, past in ((7, 100, 0), (3, 40, 96), (1, 190, 32), (5, 90, 64)):
        predicted = curves.action_time_s(curve, rows, tokens, past, 1)
        assert predicted == pytest.approx(lucky(rows, tokens, past), rel=0.02), (rows, tokens, past)


def chunked(rows: int, tokens: int, past: int, earlier: int = 1) -> float:
    """A kernel that is called once for every earlier slice, and merges its result into the others'."""
    count = earlier if past else 0
    return 4e-5 + 4e-6 * rows * tokens * (1 + count / 20) + 1e-8 * rows * tokens * (past + tokens / 2) + 3e-5 * count


def test_the_number_of_earlier_slices_is_told_from_their_tokens() -> None:
    points, seconds = measured_points(chunked, attention=True)
    curve = fit_action(points, seconds, attention=True)
    for rows, tokens, past, earlier in ((1, 100, 700, 7), (3, 100, 700, 7), (1, 200, 800, 16), (2, 64, 900, 2)):
        predicted = curves.action_time_s(curve, rows, tokens, past, earlier)
        assert predicted == pytest.approx(chunked(rows, tokens, past, earlier), rel=0.03)
    unsaid = curves.action_time_s(curve, 1, 100, 700)
    assert unsaid == curves.action_time_s(curve, 1, 100, 700, 7) > 1.2 * curves.action_time_s(curve, 1, 100, 700, 1)


def test_many_sizes_at_once_cost_what_they_cost_one_by_one() -> None:
    curve = fit_action(*measured_points(cache_steps, attention=True), attention=True)
    sizes = np.array([(1, 100, 0), (0, 100, 0), (2, 1000, 0), (8, 1024, 0), (1, 64, 960), (4, 30, 17)])
    together = curves.action_times_s(curve, *sizes.T)
    assert together.tolist() == [curves.action_time_s(curve, *size) for size in sizes.tolist()]


def test_the_roofline_counts_the_kernels_of_every_earlier_slice() -> None:
    """Five more forward and four backward for each, of one second here, where the work takes next to nothing."""
    base = local_cluster(1).kinds["cpu"]
    kind = replace(base, peak_flops_per_s={"float32": 1e30}, memory_bandwidth_bytes_per_s=1e30, overhead_s=1.0)
    none, one, four, unsaid = (
        RooflineCosts().layer_cost(LayerQuery(layer_graph(), place, kind, "float32"))
        for place in (
            MicrobatchShape(1, 8, 0, 8),
            MicrobatchShape(1, 8, 32, 8, 1),
            MicrobatchShape(1, 8, 32, 8, 4),
            MicrobatchShape(1, 8, 32, 8),
        )
    )
    assert one.forward_s - none.forward_s == pytest.approx(5) and one.input_s - none.input_s == pytest.approx(4)
    assert four.forward_s - none.forward_s == pytest.approx(20) and four.input_s - none.input_s == pytest.approx(16)
    assert (unsaid.forward_s, four.weight_s) == (four.forward_s, none.weight_s), "32 tokens are four slices of 8"


def test_curves_of_before_earlier_slices_were_told_apart_still_hold() -> None:
    old = ActionCurve(tokens=(10.0, 20.0), time_s=(1.0, 3.0), attention_s=(0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert curves.action_time_s(old, 1, 10, 40, 4) == pytest.approx(1.5)


def test_beyond_the_last_knot_the_last_slope_goes_on_and_no_rows_are_free() -> None:
    curve = ActionCurve(tokens=(10.0, 20.0), time_s=(1.0, 3.0))
    assert curves.action_time_s(curve, 1, 30) == pytest.approx(5.0)
    assert curves.action_time_s(curve, 1, 5) == pytest.approx(1.0)
    assert curves.action_time_s(curve, 0, 30) == 0.0
    assert curves.interpolate_one([10.0], [2.0], 30.0) == pytest.approx(6.0)


def test_signature_ignores_names_and_sources_and_nothing_else() -> None:
    plain = curves.digest_graph(layer_graph())
    assert curves.digest_graph(layer_graph("other_", source="model.py:7")) == plain
    assert curves.digest_graph(layer_graph(width=16)) != plain
    graph = layer_graph()
    swapped = Graph(
        inputs=graph.inputs,
        outputs=graph.outputs,
        operators=(
            *graph.operators[:2],
            Operator(kind="attention", inputs=("r", "r", "r"), outputs=("o",), attributes={"causal": False}),
            graph.operators[3],
        ),
        parameters=graph.parameters,
        tensors=graph.tensors,
    )
    assert curves.digest_graph(swapped) != plain


def measured_cluster(graph: Graph) -> Cluster:
    curve = ActionCurve(tokens=(16.0, 1024.0), time_s=(1e-3, 2e-3))
    slow = ActionCurve(tokens=(16.0, 1024.0), time_s=(4e-3, 8e-3))
    layers = tuple(
        LayerCurve(
            signature=curves.digest_graph(graph),
            name="layers.0 of toy",
            kind="cpu",
            dtype="float32",
            setting=setting,  # type: ignore[arg-type]
            processes=count,
            actions={"F": each, "I": each, "W": each, "B": each},
            points=(),
            fit_error=0.01,
        )
        for setting, count, each in (("alone", 1, curve), ("together", 2, slow))
    )
    ring = CollectiveCurve(
        operation="all_reduce",
        devices=(0, 1),
        sizes_bytes=(8, 1024),
        time_s=(1.0, 2.0),
        spread=(0.0, 0.0),
        latency_factor=2.0,
        bandwidth_factor=0.5,
    )
    measured = ClusterMeasurements(layers=layers, collectives=(ring,), overhead_s={"cpu": {"F": 1e-5, "B": 3e-5}})
    plain = local_cluster(2)
    return Cluster(
        name="toy",
        kinds=plain.kinds,
        links=plain.links,
        hosts=plain.hosts,
        rails=(),
        provenance=plain.provenance,
        measured=measured,
    )


def test_measured_costs_use_the_curve_of_the_layer_and_the_roofline_elsewhere() -> None:
    graph = layer_graph()
    cluster = measured_cluster(graph)
    kind, place = cluster.kinds["cpu"], MicrobatchShape(1, 520, 0, 520)
    costs = curves.MeasuredCosts(cluster)
    found = costs.layer_cost(LayerQuery(layer_graph("renamed_"), place, kind, "float32"))
    assert found.forward_s == pytest.approx(6e-3)
    assert found.weight_s == pytest.approx(6e-3)
    roof = RooflineCosts().layer_cost(LayerQuery(graph, place, kind, "float32"))
    assert found.saved_bytes == roof.saved_bytes
    assert curves.MeasuredCosts(cluster, "alone").layer_cost(
        LayerQuery(graph, place, kind, "float32")
    ).forward_s == pytest.approx(1.5e-3)
    assert any("measured, 0 points, together (2 processes)" in note for note in costs.notes)
    assert not any("not measured" in note for note in costs.notes)
    other = costs.layer_cost(LayerQuery(layer_graph(width=16), place, kind, "float32"))
    assert other == RooflineCosts().layer_cost(LayerQuery(layer_graph(width=16), place, kind, "float32"))
    assert any(note.endswith("on cpu in float32: not measured") for note in costs.notes)
    assert any("data-sheet peak" in note for note in costs.notes)


def test_precisions_that_compute_alike_use_one_measured_curve() -> None:
    graph, place = layer_graph(), MicrobatchShape(1, 520, 0, 520)
    cluster = measured_cluster(graph)
    assert cluster.measured is not None
    layers = tuple(replace(curve, dtype="bfloat16") for curve in cluster.measured.layers)
    costs = curves.MeasuredCosts(replace(cluster, measured=replace(cluster.measured, layers=layers)))
    kind = cluster.kinds["cpu"]
    wide, narrow = (
        costs.layer_durations(LayerQuery(graph, place, kind, precision))
        for precision in ("bfloat16", "bfloat16-gradients")
    )
    assert wide == narrow and wide.forward_s == pytest.approx(6e-3)


def test_layers_that_were_not_measured_are_corrected_by_what_measured_ones_showed() -> None:
    cluster = measured_cluster(layer_graph())
    assert cluster.measured is not None
    layers = tuple(replace(curve, against_roofline={"F": 2.0, "I": 3.0, "W": 0.5}) for curve in cluster.measured.layers)
    cluster = replace(cluster, measured=replace(cluster.measured, layers=layers))
    kind, place = cluster.kinds["cpu"], MicrobatchShape(1, 520, 0, 520)
    costs = curves.MeasuredCosts(cluster)
    guess = RooflineCosts().layer_cost(LayerQuery(layer_graph(width=16), place, kind, "float32"))
    found = costs.layer_cost(LayerQuery(layer_graph(width=16), place, kind, "float32"))
    assert (found.forward_s, found.input_s, found.weight_s) == pytest.approx(
        (2 * guess.forward_s, 3 * guess.input_s, 0.5 * guess.weight_s)
    )
    assert any("not measured; roofline x 2.00 (F), 3.00 (I), 0.50 (W)" in note for note in costs.notes)
    other = costs.layer_cost(LayerQuery(layer_graph(width=16), place, kind, "float64"))
    assert other == RooflineCosts().layer_cost(LayerQuery(layer_graph(width=16), place, kind, "float64")), (
        "another dtype"
    )


def test_full_recomputation_adds_about_a_measured_forward() -> None:
    graph = layer_graph()
    both = Graph(
        inputs=graph.inputs,
        outputs=("y",),
        operators=graph.operators,
        parameters=graph.parameters,
        tensors=graph.tensors,
    )
    cluster = measured_cluster(both)
    kind, place = cluster.kinds["cpu"], MicrobatchShape(1, 520, 0, 520)
    costs = curves.MeasuredCosts(cluster)
    plain = costs.layer_cost(LayerQuery(both, place, kind, "float32"))
    full = costs.layer_cost(LayerQuery(both, place, kind, "float32", "full"))
    assert full.input_s - plain.input_s == pytest.approx(plain.forward_s, rel=0.05)


def test_messages_collectives_and_overheads_are_looked_up() -> None:
    link = LinkCurve(sizes_bytes=(8, 1008), time_s=(1e-5, 2e-5), spread=(0.1, 0.1), between_pairs=(0.0, 0.0), pairs=1)
    assert curves.message_time_s(link, 508) == pytest.approx(1.5e-5)
    assert curves.message_time_s(link, 2008) == pytest.approx(3e-5)
    rail = RailCurve(
        sizes_bytes=(8, 1008),
        time_s=(((0.0, 1.0), (2.0, 0.0)), ((0.0, 3.0), (6.0, 0.0))),
        spread=(((0.0,) * 2,) * 2,) * 2,
    )
    assert curves.rail_message_time_s(rail, 1, 0, 508) == pytest.approx(4.0)
    cluster = measured_cluster(layer_graph())
    assert cluster.measured is not None
    host = (0, 0, 1, 1)
    assert curves.collective_factors(cluster.measured, "all_reduce", host, 2, True) == pytest.approx((2.0, 0.5))
    assert curves.collective_factors(cluster.measured, "all_gather", host, 2, True) == (1.0, 1.0)
    assert curves.stage_overhead_s(cluster) == pytest.approx(2e-5)
    assert curves.stage_overhead_s(local_cluster(2)) == 0.0


def test_a_transfer_takes_what_the_curve_of_its_very_link_says() -> None:
    cluster = measured_cluster(layer_graph())
    assert cluster.measured is not None
    link = LinkCurve(
        sizes_bytes=(8, 1008, 100008), time_s=(1e-5, 2e-5, 9e-4), spread=(0.0,) * 3, between_pairs=(0.0,) * 3, pairs=2
    )
    latency_s = cluster.links["loopback"].latency_s
    inside = replace(cluster, measured=replace(cluster.measured, links={"loopback": link}))
    for size, whole_s in ((8, latency_s), (1008, latency_s), (50508, 4.6e-4), (100008, 9e-4)):
        found = Network(inside).transfer_time([(0, 1, size)])
        assert found.whole_s == pytest.approx(whole_s), "no message is faster than the latency"
        assert found.port_s == pytest.approx(whole_s - latency_s)
    two = Cluster(
        name="two", kinds=cluster.kinds, links=cluster.links, provenance=cluster.provenance,
        hosts=tuple(replace(cluster.hosts[0], name=name) for name in "ab"),
        rails=(uniform_rail("network", 2, 1e-5, 1e9),),
    )  # fmt: skip
    rail = RailCurve(sizes_bytes=(8, 1008), time_s=(((0.0, 1e-5), (3e-5, 0.0)), ((0.0, 3e-5), (9e-5, 0.0))), spread=())
    two = replace(two, measured=ClusterMeasurements(rails={"network": rail}))
    assert Network(two).transfer_time([(0, 2, 508)]).whole_s == pytest.approx(2e-5)
    assert Network(two).transfer_time([(2, 0, 508)]).whole_s == pytest.approx(6e-5), "the other direction"
    plain = Network(replace(two, measured=None)).transfer_time([(0, 2, 508)]).whole_s
    assert plain == pytest.approx(1e-5 + 508 / 1e9)


def test_a_measured_cluster_is_costed_by_its_curves_and_collectives_by_their_factors() -> None:
    cluster = measured_cluster(layer_graph())
    assert isinstance(curves.best_costs(cluster), curves.MeasuredCosts)
    assert isinstance(curves.best_costs(local_cluster(2)), RooflineCosts)
    plain, measured = Network(local_cluster(2)), Network(cluster)
    link = plain.find_link(0, 1)
    assert all_gather_s(measured, [[0, 1]], 1e6) == all_gather_s(plain, [[0, 1]], 1e6), "no all-gather was measured"
    expected = 2 * (2.0 * link.latency_s + 1e6 / 2 * 0.5 / link.bandwidth_bytes_per_s)
    assert all_reduce_s(measured, [[0, 1]], 1e6) == pytest.approx(expected)


def test_a_measured_cluster_reloads_equal() -> None:
    cluster = measured_cluster(layer_graph())
    assert load_text(Cluster, dump_text(cluster), "cluster.json") == cluster
