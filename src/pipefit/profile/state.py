"""The state of one rank during a profile, shared by its phases, and the error when other ranks are lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipefit.codec import from_data, to_data
from pipefit.errors import ClusterError
from pipefit.profile.assemble import ProfileFindings, check_same_software, host_ranks, short_kinds
from pipefit.profile.board import StoreExchange
from pipefit.profile.config import ProfileConfig
from pipefit.profile.device import describe_rank
from pipefit.profile.facts import ProfileMember
from pipefit.profile.partial import PartialFile, PartialProfile
from pipefit.run.session.rendezvous import World

Show = Callable[[str, int, int], None]
"""Progress: (phase, done, total)."""


class ProfileSession:
    """The data of a rank during a profile. All ranks create theirs together, because they exchange descriptions."""

    def __init__(self, config: ProfileConfig, world: World, show: Show) -> None:
        self.config, self.device, self.show = config, world.device, show
        self.rank = world.rank
        self.started = time.monotonic()
        self.board = StoreExchange(world.store, world.rank, range(world.size), config.timeout_s)
        introduced = self.board.gather(
            to_data(describe_rank(world.rank, world.local_rank, world.local_size, self.device))
        )
        self.require_all("start")
        self.members = [from_data(ProfileMember, introduced[rank], f"rank {rank}") for rank in sorted(introduced)]
        check_same_software(self.members)
        self.hosts = host_ranks(self.members)
        self.kinds = short_kinds(self.members)
        self.found = ProfileFindings(members=self.members)
        self.file = PartialFile(config.output if self.rank == 0 else None)

    def keep_partial(self, phase: str, force: bool = False) -> None:
        """Write the partial file, at most every 2 s unless `force`."""
        self.file.write(
            PartialProfile(
                phase=phase,
                members=tuple(self.members),
                lost={str(rank): why for rank, why in self.board.lost.items()},
                inside=tuple(self.found.inside),
                rails={name: tuple(samples) for name, samples in self.found.rails.items()},
                layers=tuple(self.found.layers),
            ),
            force,
        )

    def require_all(self, phase: str) -> None:
        """Raise ClusterError naming the hosts of lost ranks, after writing the partial file."""
        if not self.board.lost:
            return
        if phase == "start":
            raise ClusterError(
                f"These ranks did not start: {', '.join(map(str, self.board.lost))}.",
                where="start of the profile",
                seen=f"{len(self.board.members)} ranks within {self.config.timeout_s:g} s",
            )
        self.keep_partial(phase, force=True)
        hosts = dict.fromkeys(self.members[rank].host for rank in self.board.lost)
        rank, why = next(iter(self.board.lost.items()))
        raise ClusterError(
            f"Host {', '.join(hosts)} failed while measuring: {phase}.",
            where=f"rank {', '.join(map(str, self.board.lost))}",
            seen=f"rank {rank}: {why}",
            next_step=f"repair or leave out that host and profile again; earlier measurements are in {self.file.path}",
        )
