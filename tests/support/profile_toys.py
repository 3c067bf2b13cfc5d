"""Simulated networks and ranks for the tests of the profile room."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from pipefit.profile.config import TINY
from pipefit.profile.facts import DeviceRates, ProfileMember
from pipefit.profile.links import RoundOutcome
from pipefit.profile.tournament import HostPair

SOFTWARE = {"pipefit": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "cpu": "Some CPU", "threads": "1"}


class Simulated:
    """A network with known matrices: `measure` gives noisy round trips. `drift` slows everything down over time."""

    def __init__(self, count: int, seed: int = 0, noise: float = 0.05, drift: float = 0.0) -> None:
        draw = np.random.default_rng(seed)
        self.latency_s = draw.uniform(5e-6, 5e-5, (count, count))
        self.bandwidth = draw.uniform(1e9, 2e10, (count, count))
        self.noise, self.drift, self.calls = noise, drift, 0
        self.random = random.Random(seed)
        self.dies: tuple[int, int] | None = None
        "(member, call at which it is gone)"

    def time_s(self, a: int, b: int, size: int) -> float:
        return float(self.latency_s[a, b] + size / self.bandwidth[a, b])

    def measure(self, pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        self.calls += 1
        members = [member for pair in pairs for member in pair]
        assert len(set(members)) == len(members), "pairs of one round share a member"
        times, lost = {}, {}
        for a, b in pairs:
            if self.dies and self.calls >= self.dies[1] and self.dies[0] in (a, b):
                lost[self.dies[0]] = "connection reset"
                continue
            exact = self.time_s(a, b, size) + self.time_s(b, a, TINY)
            times[a, b] = exact * (1 + self.noise * self.random.random() + self.drift * self.calls)
        return RoundOutcome(times, lost)


def members(hosts: int, per_host: int, kind: str = "cpu Some CPU") -> list[ProfileMember]:
    """Ranks host by host."""
    return [
        ProfileMember(
            rank=rank,
            host=f"host{rank // per_host}",
            local_rank=rank % per_host,
            local_size=per_host,
            cores=2,
            kind=kind,
            total_bytes=8 * 2**30,
            process_bytes=2**28,
            environment=SOFTWARE,
        )
        for rank in range(hosts * per_host)
    ]


def rates(scale: float = 1.0) -> DeviceRates:
    return DeviceRates(
        flops_per_s={"float64": 1e10 * scale, "float32": 2e10 * scale, "bfloat16": 2e10 * scale},
        memory_bandwidth_bytes_per_s=1e10,
        operator_s=1e-6,
    )


class Contended:
    """A network in which messages that are under way together share ports and uplinks evenly. Rates in bytes/s."""

    def __init__(
        self,
        count: int,
        *,
        pair: float = 1e9,
        port: float = 1e12,
        rack: int = 0,
        uplink: float = 1e12,
        spread: float = 0.0,
        noise: float = 0.01,
        seed: int = 0,
    ) -> None:
        draw = np.random.default_rng(seed)
        self.count, self.noise, self.draw = count, noise, draw
        self.pair = pair * np.exp(draw.normal(0, spread, (count, count)))
        self.port = [port] * count
        self.rack = [h // rack if rack else 0 for h in range(count)]
        self.up = [uplink] * (max(self.rack) + 1)
        self.down = list(self.up)

    def rate(self, pairs: Sequence[HostPair]) -> dict[HostPair, float]:
        """Max-min fair: all grow together; whoever has its own rate, or passes through something full, stops."""
        limit = {"out": self.port, "in": self.port, "up": self.up, "down": self.down}
        done: dict[HostPair, float] = {}
        while len(done) < len(pairs):
            room: dict[tuple[str, int], tuple[float, int]] = {}
            for pair in pairs:
                for kind, i in self._places(*pair):
                    left, growing = room.get((kind, i), (limit[kind][i], 0))
                    room[kind, i] = (left - done.get(pair, 0.0), growing + (pair not in done))
            level = {
                pair: min(float(self.pair[pair]), *(room[at][0] / room[at][1] for at in self._places(*pair)))
                for pair in pairs
                if pair not in done
            }
            least = min(level.values())
            done |= {pair: rate for pair, rate in level.items() if rate <= least * (1 + 1e-9)}
        return done

    def measure(self, pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        rates = self.rate(pairs)
        return RoundOutcome(
            {pair: size / rate * float(np.exp(self.draw.normal(0, self.noise))) for pair, rate in rates.items()}
        )

    def _places(self, a: int, b: int) -> list[tuple[str, int]]:
        across = self.rack[a] != self.rack[b]
        return [("out", a), ("in", b), *([("up", self.rack[a]), ("down", self.rack[b])] if across else [])]
