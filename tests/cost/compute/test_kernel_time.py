"""Times of kernels on accelerators against figures by hand, and the shard search's prices against them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cost.compute.test_roofline import INNER, PLACE, ROWS, TOKENS, WIDTH, kind
from tests.support.plan_toys import block_graph

from pipefit.cluster import parse_spec
from pipefit.cluster.catalogue import device_sheets
from pipefit.cluster.kinds import BANDWIDTH_SHARE, LINK_SHARE
from pipefit.cluster.types import DeviceKind
from pipefit.cost.compute.kernel_time import PassWork, kernel_time
from pipefit.cost.compute.layer_query import LayerQuery
from pipefit.cost.compute.operator_times import free_collective, operator_times
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.model.ops import KINDS
from pipefit.shard.operator_work import OperatorPricing
from pipefit.shard.rules import labels_of
from pipefit.shard.setting import ShardSetting

BANDWIDTH = 1e9
ACCELERATOR = replace(
    kind(bandwidth=BANDWIDTH), product_traffic=3.0, attention_efficiency=0.25, bandwidth_efficiency=0.4
)
WORK = PassWork(flops=4e12, moved_bytes=10e9, weight_bytes=4e9)


def test_a_product_takes_its_flops_and_its_traffic() -> None:
    time = kernel_time(WORK, KINDS["linear"], ACCELERATOR, "float32")
    assert time.seconds == pytest.approx(4 / 0.5 + 3 * 6 + 4), "activations three times, weights once"
    without = kernel_time(WORK, KINDS["linear"], replace(ACCELERATOR, product_traffic=None), "float32")
    assert without.seconds == pytest.approx(10 / 0.4), "the larger of both"


def test_a_product_in_fp8_has_its_peak_and_turns_its_factors() -> None:
    device = replace(ACCELERATOR, peak_flops_per_s={"bfloat16": 1e12, "fp8": 4e12, "float32": 1e12})
    narrow = kernel_time(WORK._replace(quantized_bytes=2e9), KINDS["linear"], device, "fp8")
    assert narrow.seconds == pytest.approx(4 / 0.5 / 4 + 0.75 * (3 * 6 + 4) + 2)
    wide = kernel_time(WORK, KINDS["linear"], device, "fp8")
    assert wide == kernel_time(WORK, KINDS["linear"], device, "bfloat16"), "the head stays in bfloat16"


def test_attention_has_a_share_of_its_own() -> None:
    assert kernel_time(WORK, KINDS["attention"], ACCELERATOR, "float32").seconds == pytest.approx(4 / 0.25)
    plain = replace(ACCELERATOR, attention_efficiency=None, product_traffic=None, bandwidth_efficiency=1.0)
    assert kernel_time(WORK, KINDS["attention"], plain, "float32").seconds == pytest.approx(10), "its bytes decide"


def test_other_operators_reach_a_share_of_the_bandwidth() -> None:
    assert kernel_time(PassWork(0, 2e9), KINDS["silu"], ACCELERATOR, "float32").seconds == pytest.approx(2 / 0.4)


def test_a_layer_is_the_sum_of_its_kernels() -> None:
    x, h, weight = ROWS * TOKENS * WIDTH, ROWS * TOKENS * INNER, WIDTH * INNER
    flops = 2 * 2 * ROWS * TOKENS * WIDTH * INNER
    products = flops / 0.5e12 + 4 * (3 * 2 * (x + h) + 2 * weight) / BANDWIDTH
    cost = RooflineCosts().layer_cost(LayerQuery(block_graph(), PLACE, ACCELERATOR, "float32"))
    assert cost.forward_s == pytest.approx(products + 4 * (2 * h + 3 * x) / (0.4 * BANDWIDTH))
    assert cost.weight_s == pytest.approx(products + 4 * 2 * 2 * weight / BANDWIDTH), "gradients: read and written once"


@pytest.mark.parametrize("device", [ACCELERATOR, replace(ACCELERATOR, product_traffic=None)])
def test_the_search_of_programs_prices_the_same_kernels(device: DeviceKind) -> None:
    graph = block_graph()
    setting = ShardSetting(
        kinds=(device,) * 2,
        collective=free_collective,
        rows=ROWS,
        tokens=TOKENS,
        precision="float32",
        microbatches=1,
    )
    tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
    parameters = {parameter.name: parameter for parameter in graph.parameters}
    shapes = {name: spec.shape for name, spec in (*tensors.items(), *parameters.items())}
    pricing = OperatorPricing(setting, shapes, tensors, parameters)
    for operator in graph.operators:
        labelled = labels_of(
            operator,
            tuple(shapes.get(name) for name in operator.inputs),
            tuple(shapes[name] for name in operator.outputs),
        )
        times = operator_times(graph, operator, device, "float32", None, setting.symbol_sizes)
        for seconds, (lines,) in zip(times, pricing.pass_lines(operator, labelled, ""), strict=True):
            assert seconds == pytest.approx(max((constant + slope for constant, slope in lines), default=0.0))


def test_data_sheets_describe_accelerators() -> None:
    for name in device_sheets():
        device = parse_spec(f"1x{name}").kinds[name]
        assert device.product_traffic == 2.0 and device.bandwidth_efficiency == BANDWIDTH_SHARE
        assert 0.15 < (device.attention_efficiency or 0) < device.efficiency <= 0.869
    assert parse_spec("2xA100-80").links["inside"].bandwidth_bytes_per_s == LINK_SHARE * 300e9
