"""Measured curves in a cluster file that cannot be: each is one message that names the entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipefit.cluster import load_cluster, local_cluster, parse_spec
from pipefit.cluster.files import check_cluster
from pipefit.cluster.measured import (
    ActionCurve,
    ClusterMeasurements,
    CollectiveCurve,
    HostUplink,
    LayerCurve,
    LinkCurve,
    LinkMethod,
    PortSharing,
    RailCurve,
)
from pipefit.cluster.types import Cluster
from pipefit.codec import dump_text
from pipefit.errors import ClusterError

CURVE = ActionCurve(tokens=(16.0, 64.0), time_s=(0.0, 2e-3), attention_s=(1e-9,))
LAYER = LayerCurve(
    signature="s", name="layers.0 of toy", kind="cpu", dtype="float32", setting="alone", processes=1,
    actions=dict.fromkeys("FIWB", CURVE), points=(), fit_error=0.0,
)  # fmt: skip
LINK = LinkCurve(sizes_bytes=(8, 1024), time_s=(1e-5, 2e-5), spread=(0.0,) * 2, between_pairs=(0.0,) * 2, pairs=2)
RING = CollectiveCurve(
    operation="all_reduce", devices=(0, 1), sizes_bytes=(8, 16), time_s=(1.0, 2.0), spread=(0.0, 0.0),
    latency_factor=2.0, bandwidth_factor=0.5,
)  # fmt: skip
RAIL = RailCurve(sizes_bytes=(8, 64), time_s=(((0.0, 1.0), (1.0, 0.0)),) * 2, spread=(((0.0, 0.0), (0.0, 0.0)),) * 2)


def cluster(**measured: Any) -> Cluster:
    return replace(local_cluster(2), measured=ClusterMeasurements(**measured))


def layer(**changes: Any) -> dict[str, Any]:
    return {"layers": (replace(LAYER, **changes),)}


def action(**changes: Any) -> dict[str, Any]:
    return layer(actions=dict.fromkeys("FIWB", replace(CURVE, **changes)))


def test_good_curves_pass() -> None:
    check_cluster(
        cluster(layers=(LAYER,), links={"loopback": LINK}, collectives=(RING,), overhead_s={"cpu": {"F": 0.0}})
    )
    check_cluster(replace(parse_spec("2x1xT4:25Gbit/s"), measured=ClusterMeasurements(rails={"network": RAIL})))


@pytest.mark.parametrize(
    ("measured", "message", "place"),
    [
        (layer(kind="gpu"), "has a device kind that", "layers[0] (layers.0 of toy, alone).kind"),
        (layer(actions={"F": CURVE}), "The curve of I is missing.", "actions"),
        (action(time_s=(0.0,)), "one time for each of its points", "actions.F"),
        (action(tokens=(), time_s=()), "one time for each of its points", "actions.F"),
        (action(tokens=(64.0, 16.0)), "do not ascend", "actions.F"),
        (action(time_s=(-1e-3, 2e-3)), "This measured figure is impossible.", "actions.F"),
        (action(time_s=(0.0, float("nan"))), "This measured figure is impossible.", "actions.F"),
        (action(attention_s=(-1.0,)), "This measured figure is impossible.", "actions.F.attention_s"),
        ({"links": {"loopback": replace(LINK, time_s=(1e-5, -1.0))}}, "impossible", "links.loopback"),
        ({"links": {"loopback": replace(LINK, time_s=(1e-5,))}}, "one time for each", "links.loopback"),
        ({"collectives": (replace(RING, latency_factor=0.0),)}, "impossible", "collectives[0] (all_reduce)"),
        ({"collectives": (replace(RING, time_s=(0.0, 1.0)),)}, "impossible", "collectives[0] (all_reduce)"),
        ({"overhead_s": {"cpu": {"F": -1.0}}}, "impossible", "overhead_s.cpu.F"),
        ({"rails": {"network": RAIL}}, "The matrices have a wrong shape.", "rails.network.time_s"),
    ],
)  # fmt: skip
def test_curves_that_cannot_be(measured: dict[str, Any], message: str, place: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_cluster(cluster(**measured), "cluster.json")
    assert message in str(caught.value)
    where = str(caught.value).split("where: cluster.json: measured.")[1].splitlines()[0]
    assert where.endswith(place)


SHARING = PortSharing(
    out_bytes_per_s=(1e9, 1e9), out_shared=(True, False), in_bytes_per_s=(1e9, 1e9), in_shared=(False, False)
)
METHOD = LinkMethod(rounds=1, full_rounds=1, repeats=3, noise=0.01, order_share=0.0)


@pytest.mark.parametrize(
    ("rail", "message", "place"),
    [
        ({"predicted": ((2,), ())}, "marked as predicted whose host the file does not have", "predicted[0]"),
        ({"sharing": replace(SHARING, in_bytes_per_s=(1e9,))}, "not one figure for each host", "in_bytes_per_s"),
        ({"sharing": replace(SHARING, out_bytes_per_s=(0.0, 1.0))}, "figure is impossible", "out_bytes_per_s"),
        (
            {
                "sharing": replace(
                    SHARING, uplinks=(HostUplink(hosts=("x",), up_bytes_per_s=1.0, down_bytes_per_s=None),)
                )
            },
            "An uplink names hosts that the file does not have",
            "sharing.uplinks[0].hosts",
        ),
        (
            {
                "sharing": replace(
                    SHARING, uplinks=(HostUplink(hosts=("host0",), up_bytes_per_s=-1.0, down_bytes_per_s=1.0),)
                )
            },
            "figure is impossible",
            "sharing.uplinks[0].up_bytes_per_s",
        ),
        ({"sharing": replace(SHARING, out_shared=(True,))}, "not one figure for each host", "sharing.out_shared"),
        ({"error": ((0.0, 0.1),)}, "The matrix has a wrong shape.", "network.error"),
        ({"error": ((0.0, -0.1), (0.1, 0.0))}, "figure is impossible", "network.error"),
        ({"method": replace(METHOD, classes=(0, 0, 1))}, "not one figure for each host", "method.classes"),
    ],
)
def test_what_a_rail_says_beside_its_times_that_cannot_be(rail: dict[str, Any], message: str, place: str) -> None:
    good = replace(
        parse_spec("2x1xT4:25Gbit/s"), measured=ClusterMeasurements(rails={"network": replace(RAIL, sharing=SHARING)})
    )
    check_cluster(good)
    assert good.measured is not None
    bad = replace(
        good, measured=ClusterMeasurements(rails={"network": replace(good.measured.rails["network"], **rail)})
    )
    with pytest.raises(ClusterError) as caught:
        check_cluster(bad, "cluster.json")
    assert message in str(caught.value)
    assert str(caught.value).split("where: ")[1].splitlines()[0].endswith(place)


def test_a_missing_link_of_a_rail_is_named(tmp_path: Path) -> None:
    bad = replace(RAIL, time_s=(((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.0), (1.0, 0.0))))
    path = tmp_path / "cluster.json"
    path.write_text(
        dump_text(replace(parse_spec("2x1xT4:25Gbit/s"), measured=ClusterMeasurements(rails={"network": bad})))
    )
    with pytest.raises(ClusterError, match=r"host0 -> host1"):
        load_cluster(path)
