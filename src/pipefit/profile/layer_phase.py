"""The layer phase of a profile: curves of the layers of the requested models, once per kind of device.

The first host of each kind measures: first one process alone, then all processes at the same time and at the same
points, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

import torch.distributed as dist

from pipefit.cluster.measured import LayerCurve, LayerPoint
from pipefit.codec import from_data, to_data
from pipefit.cost.compute.curves import digest_graph
from pipefit.errors import ModelError, PipefitError
from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.profile.board import StoreExchange
from pipefit.profile.fit import fit_layer
from pipefit.profile.layers import (
    LayerBench,
    PointSamples,
    ProfiledLayer,
    action_overhead,
    feasible_points,
    survey_points,
    typical_times,
)
from pipefit.profile.points import WorkPoint, first_points, refine_points, row_points
from pipefit.profile.state import ProfileSession

LAYERS_S = 3600.0
"""Time limit for the ranks that measure layers."""

VISIT_S = 600.0
"""Time limit for processes that wait for each other before a visit."""


def measure_layers(session: ProfileSession) -> list[Graph]:
    """Measure layer curves and overheads into the session; return the measured graphs."""
    subjects = _shared_layers(session)
    if not subjects:
        session.found.notes.append("no layers were measured: layer times come from the roofline of measured rates")
        return []
    hosts: dict[str, str] = {}
    for member in session.members:
        hosts.setdefault(session.kinds[member.kind], member.host)
    for kind, host in hosts.items():
        _measure_kind(session, kind, session.hosts[host], subjects)
    return [subject.graph for subject in subjects]


def _shared_layers(session: ProfileSession) -> list[ProfiledLayer]:
    """Return the distinct layers of the models. Rank 0 captures them and sends them, or its error, to all ranks."""
    config = session.config
    dtype = config.dtype or ("bfloat16" if session.device.type == "cuda" else "float32")
    answer: dict[str, Any] = {"subjects": [], "skipped": []}
    if session.rank == 0 and config.models:
        session.show("models", 0, 1)
        try:
            layers, answer["skipped"] = distinct_layers(config.models, dtype)
            answer["subjects"] = [to_data(subject) for subject in layers]
        except PipefitError as error:
            answer["error"] = [error.what, error.where, str(error.seen), error.allowed, error.next_step]
    answer = session.board.gather(answer, LAYERS_S)[0]
    if "error" in answer:
        what, where, seen, allowed, next_step = answer["error"]
        raise ModelError(what, where=where, seen=seen, allowed=allowed, next_step=next_step)
    session.found.notes += [f"layer {name} was not measured: it is opaque" for name in answer["skipped"]]
    return [from_data(ProfiledLayer, item, "layer") for item in answer["subjects"]]


def _measure_kind(session: ProfileSession, kind: str, ranks: Sequence[int], subjects: Sequence[ProfiledLayer]) -> None:
    lead = ranks[0]
    benches = [LayerBench(subject, session.device) for subject in subjects] if session.rank in ranks else []
    points: list[list[Any]] = []
    costs: dict[str, float] = {}
    curves: list[LayerCurve] = []
    if session.rank == lead:
        costs = action_overhead(subjects[0].dtype, session.device)
        samples = _measure_alone(session, subjects, benches)
        points = [[sample.subject, *sample.point] for sample in samples]
        curves = _layer_curves(kind, subjects, samples, costs, 1)
    answer = session.board.gather({"points": points, "overhead": costs}, LAYERS_S)[lead]
    session.require_all("layers")
    if len(ranks) > 1:
        samples = [PointSamples(subject, WorkPoint(*point)) for subject, *point in answer["points"]]
        shared = len(ranks) / session.members[lead].cores if session.device.type != "cuda" else 1.0
        crowding = max(1.0, shared)
        if session.rank in ranks:
            _measure_together(session, kind, ranks, benches, samples)
        if session.rank == lead:
            curves += _layer_curves(kind, subjects, samples, answer["overhead"], len(ranks), crowding)
    told = session.board.gather([to_data(curve) for curve in curves], LAYERS_S)[lead]
    session.require_all("layers")
    session.found.layers += [from_data(LayerCurve, item, "layer curve") for item in told]
    if answer["overhead"]:
        session.found.overhead_s[kind] = answer["overhead"]
    session.keep_partial("layers", force=True)


def _measure_alone(
    session: ProfileSession, subjects: Sequence[ProfiledLayer], benches: Sequence[LayerBench]
) -> list[PointSamples]:
    """Measure with one process of the host; points around the knee are added after a first look."""
    config = session.config
    samples = [
        PointSamples(index, point)
        for index, subject in enumerate(subjects)
        for point in starting_points(subject, config.sequence, config.tokens)
    ]
    wanted = len(samples)
    samples = feasible_points(benches, samples)
    if len(samples) < wanted:
        session.found.notes.append(f"{wanted - len(samples)} of {wanted} points of layers did not fit in memory")
    survey_points(benches, samples, 2, progress=lambda done, total: session.show("layers, first look", done, total))
    for index in range(len(subjects)):
        layer_samples = [sample for sample in samples if sample.subject == index and not subjects[index].tokens]
        whole_s = [fsum(typical_times(sample.visits)[0].values()) for sample in layer_samples]
        added = refine_points([sample.point for sample in layer_samples], whole_s, config.sequence)
        samples += [PointSamples(index, point) for point in added]
    survey_points(
        benches,
        samples,
        config.layer_rounds,
        seed=1,
        again=config.layer_rounds,
        progress=lambda done, total: session.show("layers, alone", done, total),
    )
    return samples


def starting_points(subject: ProfiledLayer, sequence: int, tokens: int) -> list[WorkPoint]:
    """Return the first points to measure. `tokens`: of the largest microbatch on a device; 0 for eight rows."""
    if subject.tokens:
        return row_points(subject.tokens, tokens or 8 * subject.tokens)
    return first_points(subject.graph, sequence, tokens or 8 * sequence)


def _measure_together(
    session: ProfileSession,
    kind: str,
    ranks: Sequence[int],
    benches: Sequence[LayerBench],
    samples: Sequence[PointSamples],
) -> None:
    """Measure the same points at the same time in all processes of the host. The first round warms up."""
    store = dist.PrefixStore(f"together/{kind}", session.board.store)
    meet = StoreExchange(store, ranks.index(session.rank), range(len(ranks)), max(VISIT_S, session.config.timeout_s))
    survey_points(
        benches,
        samples,
        session.config.layer_rounds + 1,
        again=session.config.layer_rounds,
        sync=meet.barrier,
        agree=lambda places: list(meet.gather(places)[0]),
        progress=lambda done, total: session.show("layers, all processes together", done, total),
    )
    for sample in samples:
        del sample.visits[0]


def _layer_curves(
    kind: str,
    subjects: Sequence[ProfiledLayer],
    samples: Sequence[PointSamples],
    costs: Mapping[str, float],
    processes: int,
    crowding: float = 1.0,
) -> list[LayerCurve]:
    return [
        layer_curve(subject, [s for s in samples if s.subject == index], kind, costs, processes, crowding)
        for index, subject in enumerate(subjects)
    ]


def distinct_layers(models: Sequence[str], dtype: str) -> tuple[list[ProfiledLayer], list[str]]:
    """Return (distinct layers of the models, names of opaque layers). Raises ModelError for an unknown model."""
    from pipefit.model.registry import open_model

    layers: dict[str, ProfiledLayer] = {}
    skipped = []
    for source in models:
        model = open_model(source)
        for layer in model.layers:
            graph = model.layer_graph(layer)
            if any(KINDS[operator.kind].is_module for operator in graph.operators):
                skipped.append(f"{layer.name} of {source}")
                continue
            name = f"{layer.name} of {source}"
            layers.setdefault(digest_graph(graph), ProfiledLayer(graph, name, dtype, fixed_length(model) or 0))
    return list(layers.values()), skipped


def layer_curve(
    subject: ProfiledLayer,
    samples: Sequence[PointSamples],
    kind: str,
    costs: Mapping[str, float],
    processes: int,
    crowding: float = 1.0,
) -> LayerCurve:
    """Return the curves of one layer, from its samples less the overhead of an action."""
    points = [sample.point for sample in samples]
    seen = [typical_times(sample.visits, crowding) for sample in samples]
    varies = not subject.tokens  # at one row length attention grows with the rows, like all operators
    attention = varies and any(KINDS[operator.kind].is_attention for operator in subject.graph.operators)
    actions, worst = fit_layer(points, [seconds for seconds, _ in seen], attention, costs)
    return LayerCurve(
        signature=digest_graph(subject.graph),
        name=subject.name,
        kind=kind,
        dtype=subject.dtype,
        setting="alone" if processes == 1 else "together",
        processes=processes,
        actions=actions,
        points=tuple(
            LayerPoint(rows=p.rows, tokens=p.tokens, past=p.past, earlier=p.earlier, time_s=seconds, spread=spread)
            for p, (seconds, spread) in zip(points, seen, strict=True)
        ),
        fit_error=worst,
    )
