"""The form of the hidden state on every group, chosen such that computing it and passing it on is cheapest together.

It is a shortest path along the stages. A stage costs the time of its program with that form; a boundary costs the
transfer of the hidden state and its gradient between the two groups. `plan/assemble/structure.py` defines which forms
can be sent to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from pipefit.cost.comm.network import Network
from pipefit.layout import IDENTITY, Mesh, MeshAxis, TensorForm, box_size, parse_form, transfer_moves
from pipefit.plan.assemble.structure import can_transfer, gradient_form
from pipefit.plan.passes.device_groups.layouts import Devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneForms:
    """A lane's group, with the cost of each form of the hidden state."""

    devices: Devices
    shares: tuple[int, ...]
    cost_s: Mapping[TensorForm, float]
    "Time of all compute and communication of the lane for a microbatch."

    @property
    def lane_group(self) -> Mesh:
        return Mesh(axes=(MeshAxis(name="shard", shares=self.shares),), devices=self.devices)


def single_device_lane(device: int, cost_s: float) -> LaneForms:
    """Return a lane of one device."""
    return LaneForms(devices=(device,), shares=(1,), cost_s={IDENTITY: cost_s})


def cheapest_forms(
    network: Network, lanes: Sequence[LaneForms], placement: Sequence[int], shape: tuple[int, ...], width: int
) -> tuple[TensorForm, ...] | None:
    """Return the form of every lane; None if no forms can be combined.

    `shape` is the hidden state of a microbatch on one replica, `width` its bytes per element. A lane that holds several
    stages keeps to one form.
    """
    if len({*placement}) < len(placement):  # the path returns to a lane: all lanes use the same form
        return _common_forms(network, lanes, placement, shape, width)
    paths: dict[TensorForm, tuple[float, tuple[TensorForm, ...]]] = {
        form: (cost, (form,)) for form, cost in lanes[0].cost_s.items()
    }
    for previous, lane in pairwise(lanes):
        after: dict[TensorForm, tuple[float, tuple[TensorForm, ...]]] = {}
        for form, cost in lane.cost_s.items():
            for before, (sofar, path) in paths.items():
                passing = pass_s(network, (previous, before), (lane, form), shape, width)
                if passing is not None and (form not in after or sofar + passing + cost < after[form][0]):
                    after[form] = sofar + passing + cost, (*path, form)
        paths = after
    return min(paths.values(), key=lambda path: path[0], default=(0.0, None))[1]


def _common_forms(
    network: Network, lanes: Sequence[LaneForms], placement: Sequence[int], shape: tuple[int, ...], width: int
) -> tuple[TensorForm, ...] | None:
    """Return the cheapest form that every group supports; single devices hold the full tensor."""
    best: tuple[float, tuple[TensorForm, ...]] | None = None
    for wanted in dict.fromkeys(form for lane in lanes for form in lane.cost_s):
        forms = tuple(wanted if len(lane.devices) > 1 else IDENTITY for lane in lanes)
        if any(form not in lane.cost_s for form, lane in zip(forms, lanes, strict=True)):
            continue
        total = fsum(lane.cost_s[form] for form, lane in zip(forms, lanes, strict=True))
        for a, b in pairwise(placement):
            passing = 0.0 if a == b else pass_s(network, (lanes[a], forms[a]), (lanes[b], forms[b]), shape, width)
            total = float("inf") if passing is None else total + passing
        if total < float("inf") and (best is None or total < best[0]):
            best = total, forms
    return None if best is None else best[1]


def pass_s(
    network: Network,
    one: tuple[LaneForms, TensorForm],
    two: tuple[LaneForms, TensorForm],
    shape: tuple[int, ...],
    width: int,
) -> float | None:
    """Return seconds to send the hidden state of a microbatch, and its gradient back; None if the forms are
    incompatible."""
    (source, gives), (target, takes) = one, two
    if not can_transfer((gives, len(source.devices)), (takes, len(target.devices))):
        return None
    back = [parse_form(gradient_form(form, len(held.devices))) for held, form in (one, two)]
    total = 0.0
    for sender, sent, receiver, received in (
        (source.lane_group, gives, target.lane_group, takes),
        (target.lane_group, back[1], source.lane_group, back[0]),
    ):
        moves = transfer_moves(shape, sender, (sent,), receiver, (received,))
        total += network.transfer_time([(m.source, m.target, float(width * box_size(m.box))) for m in moves]).whole_s
    return total
