"""Stages whose microbatches differ: the costs of packed rows, and timelines as ragged as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipefit.cluster import parse_spec
from pipefit.cluster.measured import ActionCurve, ClusterMeasurements, LayerCurve
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import MeasuredCosts, action_time_s, digest_graph
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.packed_rows import equivalent_rows, with_equal_rows
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.pipeline.contention import split_pipelines, with_contention
from pipefit.cost.pipeline.table import cost_table, stage_cost
from pipefit.cost.work import EdgeWork, ParameterCounts, PipelineWork, StageWork
from pipefit.layout import Mesh, MeshAxis
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.schedule.families import find_family
from pipefit.schedule.problem import ScheduleProblem
from pipefit.simulate import simulate_schedule

WIDTH, HEADS = 64, 4


def layer() -> Graph:
    """A linear layer over the row, and attention within its images."""
    split = ("B", "T", HEADS, WIDTH // HEADS)
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=("B", "T", WIDTH)),
            TensorSpec(name="documents", shape=("B", "T"), dtype="int64", role="documents"),
        ),
        outputs=("y",),
        operators=(
            Operator(kind="linear", inputs=("x", "w", ""), outputs=("h",)),
            Operator(kind="reshape", inputs=("h",), outputs=("q",), attributes={"shape": list(split)}),
            Operator(
                kind="packed_attention",
                inputs=("q", "q", "q", "documents"),
                outputs=("o",),
                attributes={"scale": 0.25},
            ),
            Operator(kind="reshape", inputs=("o",), outputs=("y",), attributes={"shape": ["B", "T", WIDTH]}),
        ),
        parameters=(ParameterSpec(name="w", shape=(WIDTH, WIDTH)),),
        tensors=(
            TensorSpec(name="h", shape=("B", "T", WIDTH)),
            TensorSpec(name="q", shape=split),
            TensorSpec(name="o", shape=split),
            TensorSpec(name="y", shape=("B", "T", WIDTH)),
        ),
    )


def stage(lane: int, devices: tuple[int, ...], sizes: tuple[tuple[tuple[int, int], ...], ...]) -> StageWork:
    axes = (MeshAxis(name="replica", shares=(1,) * len(devices)), MeshAxis(name="shard", shares=(1,)))
    counts = ParameterCounts(trainable=(WIDTH * WIDTH,), frozen=(0,), whole=(0,))
    return StageWork(
        lane=lane,
        group=Mesh(axes=axes, devices=devices),
        layers=((layer(),),),
        rows=(1,) * len(devices),
        slices=(512,),
        recompute="none",
        parameters=counts,
        sharded_state="none",
        packed=sizes,
    )


SIZES = (((4096, 4096 * 256), (0, 0)), ((1024, 1024 * 128), (700, 700 * 700)), ((5000, 5000 * 900), (3000, 3000 * 30)))
"""Two replicas in three microbatches: (tokens, squares)."""


def pipeline(sizes: tuple[tuple[tuple[int, int], ...], ...] = SIZES) -> PipelineWork:
    first, second = stage(0, (0, 1), sizes), stage(1, (2,), tuple((max(row),) for row in sizes))
    sent = [tuple((at, 2, 4.0 * WIDTH * row[at][0]) for at in (0, 1)) for row in sizes]
    back = [tuple((b, a, size) for a, b, size in each) for each in sent]
    edge = EdgeWork(
        source=0,
        target=1,
        tensor="",
        forward=(max(sent, key=lambda each: sum(size for _, _, size in each)),),
        backward=(max(back, key=lambda each: sum(size for _, _, size in each)),),
        ragged=tuple(zip(sent, back, strict=True)),
    )
    return PipelineWork(stages=(first, second), edges=(edge,), precision="bfloat16")


NETWORK = Network(parse_spec("4xA100-80"))


def test_every_microbatch_costs_what_its_fullest_replica_does() -> None:
    work = pipeline()
    table = cost_table(work, NETWORK, RooflineCosts())
    assert table.actions["F"].time_s.shape == (2, 3, 1)
    for microbatch, row in enumerate(SIZES):
        tokens, squares = (max(column) for column in zip(*row, strict=True))
        own = stage_cost(with_equal_rows(work.stages[0], tokens, squares), tokens, 0, work, NETWORK, RooflineCosts())
        for kind, field in (("F", "forward_s"), ("B", "backward_s")):
            time_s = table.actions[kind].time_s[0, microbatch, 0]
            assert time_s == pytest.approx(getattr(own, field), rel=1e-9 if microbatch == 0 else 0.05)
        assert table.actions["F"].held_bytes[0, microbatch, 0] == pytest.approx(own.saved_bytes, rel=1e-6)
    assert table.actions["F"].time_s[0, 2, 0] > 1.5 * table.actions["F"].time_s[0, 1, 0]


def test_transfers_are_as_long_as_their_microbatch() -> None:
    table = cost_table(pipeline(), NETWORK, RooflineCosts())
    edge = table.edges[0]
    assert edge.forward_s.shape == edge.forward_bytes.shape == (3, 1)
    for microbatch, row in enumerate(SIZES):
        assert edge.forward_bytes[microbatch, 0] == 4 * WIDTH * sum(tokens for tokens, _ in row)
        expected = NETWORK.transfer_time([(at, 2, 4.0 * WIDTH * row[at][0]) for at in (0, 1)])
        assert edge.forward_s[microbatch, 0] == expected.whole_s


def test_equal_microbatches_are_a_uniform_pipeline() -> None:
    size = (1024, 1024 * 128)
    ragged = pipeline(((size, size),) * 3)
    uniform = replace(
        ragged,
        stages=tuple(with_equal_rows(one, *size) for one in ragged.stages),
        edges=tuple(replace(edge, ragged=()) for edge in ragged.edges),
    )
    first, second = (cost_table(work, NETWORK, RooflineCosts()) for work in (ragged, uniform))
    one, two = (
        simulate_schedule(find_family("1f1b")(ScheduleProblem(placement=(0, 1), microbatches=3, costs=c)), c)
        for c in (first, second)
    )
    assert one.makespan_s == pytest.approx(two.makespan_s, rel=1e-12)
    assert np.allclose(one.peak_bytes, two.peak_bytes)


def test_the_timeline_is_as_ragged_as_its_microbatches() -> None:
    table = cost_table(pipeline(), NETWORK, RooflineCosts())
    timeline = simulate_schedule(
        find_family("1f1b")(ScheduleProblem(placement=(0, 1), microbatches=3, costs=table)), table
    )
    spans = {str(span.action): span.stop_s - span.start_s for span in timeline.all_spans()}
    for microbatch in range(3):
        own_s = table.actions["F"].time_s[0, microbatch, 0] + table.overhead_s
        assert spans[f"0F{microbatch}"] == pytest.approx(own_s)
    assert timeline.busy_s[0] == pytest.approx(
        sum(table.actions[kind].time_s[0].sum() + 3 * table.overhead_s for kind in "FB")
    )


def test_without_a_backward_nothing_is_kept_or_done_after_the_forward() -> None:
    work = pipeline()
    frozen = replace(work, stages=(replace(work.stages[0], frozen=1), work.stages[1]))
    trained, table = (cost_table(one, NETWORK, RooflineCosts()) for one in (work, frozen))
    assert np.array_equal(table.actions["F"].time_s, trained.actions["F"].time_s)
    assert trained.actions["B"].time_s[0].min() > 0.0 == table.actions["B"].time_s[0].max()
    assert trained.actions["F"].held_bytes[0].min() > 0.0 == table.actions["F"].held_bytes[0].max()
    assert len(lane_limits(frozen, NETWORK)) == 2


def test_measured_curves_take_a_packed_row_for_its_images() -> None:
    """Four images of 256 tokens in one row take what four rows of 256 tokens do, one of 1,024 what one row does."""
    curve = ActionCurve(tokens=(16.0, 4096.0), time_s=(1e-3, 9e-3), attention_s=(1e-8, *(0.0,) * 8))
    four, one = (
        MicrobatchShape(1, 1024, 0, 1024, symbols=(("squares", count * (1024 // count) ** 2),)) for count in (4, 1)
    )
    assert equivalent_rows(four) == (4.0, 256.0) and equivalent_rows(one) == (1.0, 1024.0)
    assert equivalent_rows(MicrobatchShape(3, 7, 0, 7)) == (3, 7)
    assert equivalent_rows(MicrobatchShape(1, 0, 0, 0, symbols=(("squares", 0),))) == (1, 0)
    assert action_time_s(curve, *equivalent_rows(four)) == action_time_s(curve, 4, 256) < action_time_s(curve, 1, 1024)


def test_a_part_of_a_packed_layer_is_corrected_by_its_images_too() -> None:
    """The whole layer measured, twice what the roofline says of four images in a row: so is every part of it."""
    place = MicrobatchShape(1, 1024, 0, 1024, symbols=(("squares", 4 * 256**2),))
    cluster, whole = parse_spec("4xA100-80"), layer()
    kind = next(iter(cluster.kinds.values()))
    expected_s = RooflineCosts().layer_durations(LayerQuery(whole, place, kind, "bfloat16")).forward_s
    attention_s = expected_s / (4 * 256**2 / 2)
    curve = ActionCurve(tokens=(16.0, 4096.0), time_s=(expected_s, expected_s), attention_s=(attention_s, *(0.0,) * 8))
    measured = LayerCurve(
        signature=digest_graph(whole),
        name="vision",
        kind=kind.name,
        dtype="bfloat16",
        setting="together",
        processes=1,
        actions=dict.fromkeys("FIWB", curve),
        points=(),
        fit_error=0.0,
    )
    part = replace(whole, parameters=(ParameterSpec(name="w", shape=(WIDTH, WIDTH), trainable=False),))
    costs = MeasuredCosts(replace(cluster, measured=ClusterMeasurements(layers=(measured,))), graphs=[whole])
    found = costs.layer_durations(LayerQuery(part, place, kind, "bfloat16"))
    assert found.forward_s == pytest.approx(2 * expected_s, rel=1e-3)


def joined(first: StageWork, second: StageWork, sent: Sequence[Sequence[tuple[int, int, float]]]) -> PipelineWork:
    """Two stages; what is sent of every microbatch, the largest first, comes back the other way."""
    ahead = [tuple(each) for each in sent]
    back = [tuple((b, a, size) for a, b, size in each) for each in ahead]
    edge = EdgeWork(
        source=0, target=1, tensor="", forward=(ahead[0],), backward=(back[0],),
        ragged=tuple(zip(ahead, back, strict=True)),
    )  # fmt: skip
    return PipelineWork(stages=(first, second), edges=(edge,), precision="bfloat16")


def test_a_replica_without_images_in_the_largest_microbatch_has_its_own_largest() -> None:
    """Two replicas on their own ways to two others; the one has all tokens of the largest microbatch."""
    sizes = (((4096, 4096), (0, 0)), ((0, 0), (700, 700)))
    first, second = stage(0, (0, 1), sizes), stage(1, (2, 3), sizes)
    sent = [tuple((at, 2 + at, 4.0 * WIDTH * row[at][0]) for at in (0, 1) if row[at][0]) for row in sizes]
    work = joined(first, second, sent)
    found = with_contention(cost_table(work, NETWORK, RooflineCosts()), work, NETWORK, RooflineCosts()).contention
    assert found is not None and len([key for key in found.flows if key[0] == "SEND_F"]) == 2


def test_replicas_that_exchange_in_some_microbatch_are_one_pipeline() -> None:
    """They keep to themselves in the largest microbatch; in the other the second sends to the first."""
    sizes = (((4096, 4096), (2048, 2048)), ((700, 700), (700, 700)))
    first, second = stage(0, (0, 1), sizes), stage(1, (2, 3), sizes)

    def pairs(crossing: int) -> list[tuple[tuple[int, int, float], ...]]:
        return [((0, 2, 4096.0), (1, 3, 2048.0)), ((0, 2, 700.0), (1, crossing, 700.0))]

    for crossing, count in ((3, 2), (2, 1)):
        work = joined(first, second, pairs(crossing))
        found = split_pipelines(cost_table(work, NETWORK, RooflineCosts()), work, NETWORK, RooflineCosts())
        assert len(found.works) == count


def test_what_moves_within_a_lane_takes_its_time_on_equal_grids_too() -> None:
    """Two stages on the same two devices; the second replica's tokens are the first one's in the next stage."""
    sizes = (((4096, 4096), (4096, 4096)),) * 2
    first, second = stage(0, (0, 1), sizes), stage(0, (0, 1), sizes)
    still, moved = (((0, 0, 1e9), (1, 1, 1e9)), ((0, 0, 1e9), (1, 0, 1e9)))
    times = []
    for sent in (still, moved):
        back = tuple((b, a, size) for a, b, size in sent)
        edge = EdgeWork(
            source=0, target=1, tensor="", forward=(still,), backward=(still,), ragged=((still, still), (sent, back))
        )
        work = PipelineWork(stages=(first, second), edges=(edge,), precision="bfloat16")
        times.append(cost_table(work, NETWORK, RooflineCosts()).actions["F"].time_s)
    longer = (times[1] - times[0])[:, :, 0]
    assert (
        longer[0].tolist() == pytest.approx([0.0, NETWORK.transfer_time([(1, 0, 1e9)]).whole_s]) and not longer[1].any()
    )
