"""The link phase of a profile: links inside hosts, then between hosts, on every rail.

Between hosts, the first measurement is whether simultaneous pairs disturb each other. Then the pairs are measured: all,
or enough rounds to predict the rest. Last are the joint rates of two messages through a host and of several through a
rack. Rank 0 decides the next measurement, and all ranks do it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipefit.cluster.measured import HostUplink, PortSharing
from pipefit.codec import from_data, to_data
from pipefit.profile.adaptive import ALL_PAIRS_HOSTS, AdaptiveSurvey
from pipefit.profile.assemble import RailNotes
from pipefit.profile.classes import find_classes
from pipefit.profile.completion import complete_links
from pipefit.profile.estimate import LinkShape, LinkTable, pair_times, tabulate_samples
from pipefit.profile.flood import find_flooded
from pipefit.profile.links import Games, LinkSurvey, RoundOutcome, survey_pairs
from pipefit.profile.sharing import (
    SLOWER,
    CrowdMeasurement,
    HostTriple,
    build_sharing,
    choose_hubs,
    find_racks,
    measure_crowd,
    measure_ports,
    measure_uplinks,
)
from pipefit.profile.state import ProfileSession
from pipefit.profile.tournament import HostPair, round_robin, shuffle_members, shuffle_rounds, thin_rounds
from pipefit.profile.wire import MOST_BYTES, LinkEndpoint

PROBE = 64 * 2**10
"""Bytes of the first messages, from which the number of repetitions is chosen."""

LONGEST_S = 0.25
"""Sizes whose message would take longer than this on the median link are omitted."""

MEASURE_S = 0.1
"""A measurement repeats its message for about this long."""

SHARED_S = 0.02
"""Duration of each message when several are sent at once."""

ALONE_ROUNDS, ALONE_PAIRS = 4, 8
"""With many hosts: rounds, and pairs of each round, that are also measured alone, to detect whether pairs disturb each
other."""

MIN_CLASS_HOSTS = 6
"""Minimum number of hosts for finding classes."""

DECIDE_S = 600.0
"""Time limit for a decision of rank 0."""


@dataclass(slots=True)
class RoundRules:
    """Limits on the pairs of a round."""

    width: int
    "The most pairs at a time."
    classes: dict[int, int] = field(default_factory=dict)
    "By rank: at most one pair at a time leaves each class; empty for no such limit."

    def limit_rounds(self, games: Games) -> list[list[HostPair]]:
        return thin_rounds(games, self.width, self.classes or None)


def measure_links(session: ProfileSession) -> None:
    """Measure the links inside and between hosts, and store samples and method in the session."""
    groups = [ranks for ranks in session.hosts.values() if len(ranks) > 1]
    if groups:
        phase, wire = "links inside hosts", LinkEndpoint(session.board, session.device)
        sizes = _settle_sizes(session, wire, shuffle_members(groups)(0)[:1])
        survey = LinkSurvey(samples=session.found.inside)
        survey_pairs(
            shuffle_members(groups), sizes, session.config.link_rounds, wire.measure,
            found=survey, after_round=_progress_callback(session, phase),
        )  # fmt: skip
        session.require_all(phase)
    if len(session.hosts) > 1:
        for rail in range(session.config.rails):
            name = f"rail{rail}" if session.config.rails > 1 else "network"
            ranks = [members[min(rail, len(members) - 1)] for members in session.hosts.values()]
            HostLinkSurvey(session, name, ranks).measure_all()


class HostLinkSurvey:
    """The survey of one rail; `ranks` has one rank of each host."""

    def __init__(self, session: ProfileSession, name: str, ranks: Sequence[int]) -> None:
        self.session, self.name, self.ranks = session, name, list(ranks)
        self.phase = f"links between hosts, {name}"
        self.wire = LinkEndpoint(session.board, session.device)
        self.repeats = session.config.link_rounds
        self.found = LinkSurvey(samples=session.found.rails.setdefault(name, []))
        self.played = 0
        "Rounds of the survey, without repetitions."

    def measure_all(self) -> None:
        """Run the complete survey."""
        games = shuffle_members([self.ranks])(0)
        few = len(self.ranks) <= ALL_PAIRS_HOSTS
        self.sizes = _settle_sizes(self.session, self.wire, games[:1])
        self.session.require_all(self.phase)
        self.session.show(f"{self.phase}: do simultaneous pairs disturb each other", 0, 1)
        looked = games if few else games[:ALONE_ROUNDS]
        crowd = measure_crowd(looked, self.shared_bytes, self._measure_unless_lost, sample=0 if few else ALONE_PAIRS)
        self.session.require_all(self.phase)
        rules = self._spread_out(crowd) if crowd.is_disturbed else RoundRules(len(self.ranks))
        wanted = self.session.config.host_rounds
        everything = wanted == "all" or (wanted == "auto" and len(self.ranks) <= ALL_PAIRS_HOSTS)
        if everything:
            self._survey_links(lambda repeat: rules.limit_rounds(shuffle_members([self.ranks])(repeat)))
            shape, held_out, predicts = self._host_shape(), None, False
        else:
            shape, held_out, predicts = self._survey_adaptively(rules, wanted)
        self.session.found.surveys[self.name] = RailNotes(
            rounds=self.played,
            full_rounds=len(round_robin(self.ranks)),
            repeats=self.repeats,
            shape=shape,
            predicts=predicts,
            held_out_error=held_out,
            crowded=crowd.is_disturbed,
            sharing=self._measure_sharing(rules, shape, predicts) if len(self.ranks) > 2 else None,
        )

    @property
    def shared_bytes(self) -> int:
        """The size of messages of which several are sent at once."""
        return int(min(max(PROBE, SHARED_S * self.wire.bytes_per_s), self.session.config.sizes_bytes[-1]))

    def _survey_links(self, games: Callable[[int], Games], sizes: Sequence[int] = (), seed: int = 0) -> None:
        self.played += len(games(0))
        survey_pairs(
            games, sizes or self.sizes, self.repeats, self.wire.measure,
            seed=seed, found=self.found, after_round=_progress_callback(self.session, self.phase),
        )  # fmt: skip
        self.session.require_all(self.phase)

    def _survey_adaptively(self, way: RoundRules, wanted: str) -> tuple[LinkShape | None, float | None, bool]:
        """Measure in batches. Returns (structure of the hosts' links, error of predictions, whether links are
        predicted)."""
        chooser = AdaptiveSurvey(self.ranks, rounds_wanted=int(wanted) if wanted != "auto" else None)
        batch = 0
        while games := self._agree_on(lambda: chooser.next_rounds(self.found.samples)):
            mix = shuffle_rounds(_parse_rounds(games), batch)
            self._survey_links(lambda repeat, mix=mix: way.limit_rounds(mix(repeat)), seed=batch)  # type: ignore[misc]
            batch += 1
        progress = chooser.progress
        told = self._agree_on(lambda: [to_data(progress.host_shape), progress.held_out[-1:], not progress.everything])
        shape = from_data(LinkShape, told[0], "shape") if told[0] is not None else None
        return shape, told[1][0] if told[1] else None, told[2]

    def _host_shape(self) -> LinkShape | None:
        """Return the structure of the hosts' links if all pairs were measured; link times are shrunk towards it."""
        if len(self.ranks) < MIN_CLASS_HOSTS:
            return None
        told = self._agree_on(lambda: to_data(complete_links(_largest_messages(self.found, self.ranks)).shape))
        return from_data(LinkShape, told, "shape")

    def _spread_out(self, found: CrowdMeasurement) -> RoundRules:
        """Return the rules for simultaneous pairs if pairs disturb each other.

        One pair per rack, if racks are found and that suffices; else one pair per sixteen hosts.
        """
        alone = RoundRules(max(1, len(self.ranks) // ALL_PAIRS_HOSTS))
        if len(self.ranks) <= ALL_PAIRS_HOSTS:
            slow = [pair for pair, slower in found.slowdown.items() if slower > SLOWER]
            classes = find_racks(self.ranks, found, self.shared_bytes, self._measure_unless_lost)
            explained = all(_crosses_class(pair, classes) for pair in slow)
            if not explained:
                wide = find_flooded(self.ranks, found.alone, self.shared_bytes, self._measure_unless_lost)
                explained = bool(wide) and all(_crosses_class(pair, wide) for pair in slow)
                classes = wide if explained else classes
            alone = replace(alone, classes=classes)
        else:
            classes = self._find_racks()
            explained = bool(classes)
        if not explained:
            return alone
        rules = RoundRules(len(self.ranks), classes)
        fullest = sorted(rules.limit_rounds(shuffle_members([self.ranks])(0)), key=len, reverse=True)[
            : 2 * ALONE_ROUNDS
        ]
        again = measure_crowd(fullest, self.shared_bytes, self._measure_unless_lost, sample=ALONE_PAIRS)
        self.session.require_all(self.phase)
        return alone if again.is_disturbed else rules

    def _find_racks(self) -> dict[int, int]:
        """Return racks, from the hosts that are slower beside others; empty if none are visible."""
        beside = LinkSurvey()
        survey_pairs(
            lambda repeat: shuffle_members([self.ranks])(repeat)[: 4 * ALL_PAIRS_HOSTS], [self.shared_bytes], 2,
            self.wire.measure, found=beside, after_round=_progress_callback(self.session, f"{self.phase}: pairs "
            "that disturb each other"),
        )  # fmt: skip
        self.session.require_all(self.phase)

        def find_labels() -> list[int]:
            alike = find_classes(tabulate_samples(beside.samples, self.ranks))
            return list(alike.classes) if alike else []

        labels = self._agree_on(find_labels)
        return dict(zip(self.ranks, labels, strict=True)) if labels else {}

    def _measure_sharing(self, way: RoundRules, shape: LinkShape | None, predicts: bool) -> PortSharing:
        """Measure the joint rates of several messages."""
        times = pair_times(self.found.samples, self.ranks, shape=shape, predict=predicts)
        position = {rank: index for index, rank in enumerate(self.ranks)}
        large = times.sizes_bytes[-1]
        rates = {
            (a, b): large
            / max(1e-9, times.time_s[-1, position[a], position[b]] - times.time_s[0, position[a], position[b]] / 2)
            for a in self.ranks
            for b in self.ranks
            if a != b
        }
        classes = way.classes or (dict(zip(self.ranks, shape.classes, strict=True)) if shape and shape.classes else {})
        classes = classes or find_flooded(self.ranks, rates, self.shared_bytes, self._measure_unless_lost)

        def plan_groups() -> list[Any]:
            hub_groups = choose_hubs(self.ranks, rates, classes or None)
            if way.width == 1:
                hub_groups = [[hub] for group in hub_groups for hub in group]
            return [[to_data(hub) for hub in group] for group in hub_groups]

        told = [[from_data(HostTriple, hub, "hub") for hub in group] for group in self._agree_on(plan_groups)]
        size, repeats = self.shared_bytes, min(3, self.repeats)
        ports = measure_ports(told, rates, size, repeats, self._measure_unless_lost)
        names = {rank: self.session.members[rank].host for rank in self.ranks}
        uplinks: list[HostUplink] = []
        if classes:
            uplinks = measure_uplinks(self.ranks, classes, names, rates, size, repeats, self._measure_unless_lost)
        self.session.require_all(self.phase)
        return build_sharing(self.ranks, ports, uplinks)

    def _measure_unless_lost(self, pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        """`LinkEndpoint.measure`, but empty once a rank is lost: then the measurement cannot succeed any more."""
        return RoundOutcome({}) if self.session.board.lost else self.wire.measure(pairs, size)

    def _agree_on(self, make: Callable[[], Any]) -> Any:
        """Return rank 0's result of `make` on all ranks."""
        told = self.session.board.gather(make() if self.session.rank == 0 else None, DECIDE_S)
        self.session.require_all(self.phase)
        return told[0]


def _largest_messages(found: LinkSurvey, ranks: Sequence[int]) -> LinkTable:
    """Return the table of the largest messages."""
    table = tabulate_samples(found.samples, ranks)
    return table.select_size(len(table.sizes_bytes) - 1)


def _crosses_class(pair: HostPair, classes: dict[int, int]) -> bool:
    """Return whether a pair leaves or enters a class of several hosts."""
    first, second = (classes[member] for member in pair)
    labels = list(classes.values())
    return first != second and max(labels.count(first), labels.count(second)) > 1


def _parse_rounds(told: Sequence[Sequence[Sequence[int]]]) -> list[list[HostPair]]:
    """Convert JSON lists to rounds of pairs."""
    return [[(a, b) for a, b in pairs] for pairs in told]


def _settle_sizes(session: ProfileSession, wire: LinkEndpoint, games: Games) -> tuple[int, ...]:
    """Choose the number of repetitions and the measured sizes, from a first message over some pairs."""
    times = [time_s for pairs in games for time_s in wire.measure(pairs, PROBE).round_trip_s.values()]
    if not times:
        return session.config.sizes_bytes
    wire.bytes_per_s = PROBE / statistics.median(times)
    wire.most_bytes = int(min(MOST_BYTES, max(PROBE, MEASURE_S * wire.bytes_per_s)))
    longest = max(LONGEST_S * wire.bytes_per_s, session.config.sizes_bytes[min(2, len(session.config.sizes_bytes) - 1)])
    return tuple(size for size in session.config.sizes_bytes if size <= longest)


def _progress_callback(session: ProfileSession, phase: str) -> Callable[[int, int, LinkSurvey], None]:
    def report_round(done: int, total: int, found: LinkSurvey) -> None:
        session.show(phase, done, total)
        session.keep_partial(phase)

    return report_round
