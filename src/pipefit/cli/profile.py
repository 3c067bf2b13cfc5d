"""`pipefit profile`: measure the machines, or read the output of other tools, and write a cluster file."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pipefit.cli._options import takes_options
from pipefit.errors import ClusterError, PipefitError, RunError
from pipefit.profile.config import SIZES, ProfileConfig
from pipefit.profile.facts import LAYER_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `pipefit profile` beside those of the measurement."""

    files: tuple[str, ...] = ()
    "With --from: files (or a node list) to read."
    local: int = 0
    "Start this many processes on this machine and measure them as one host."
    quick: bool = False
    "Fewer repetitions and sizes: a first look."
    source: str = ""
    "Read another tool's output instead of measuring: see the docs."
    devices: str = ""
    "With --from, if not in the files: devices of a host, such as 8xH100."
    network: str = ""
    "With --from, if not in the files: bandwidth of a host, such as 200Gbit/s."
    as_json: bool = False
    "Print the cluster as JSON as well."


@takes_options(
    ProfileConfig,
    ProfileOptions,
    arguments=("files",),
    flags={
        "output": ("-o", "--output"),
        "models": ("--model",),
        "layer_rounds": ("--rounds",),
        "source": ("--from",),
    },
    hidden=("sizes_bytes",),
)
def command(config: ProfileConfig, options: ProfileOptions) -> None:
    """Measure hosts, links and layers, and write a cluster file: alone, with --local N, or under torchrun."""
    from pipefit.codec import dump_text, make_folder

    output = config.output
    make_folder(output, "cluster file", ClusterError)
    if options.source:
        from pipefit.cluster.files import save_cluster_file
        from pipefit.cluster.readers import read_cluster

        cluster = read_cluster(options.source, options.files, devices=options.devices, network=options.network)
        save_cluster_file(cluster, output)
        _write_cluster(cluster, output, options.as_json, dump_text)
        return
    _check_options(config, options)
    _check_links(config)
    from pipefit.run.session.launch import run_local
    from pipefit.run.session.rendezvous import under_torchrun

    if options.local > 1 and not under_torchrun():
        try:
            code = run_local(options.local, sys.argv[1:])
        except RunError as error:
            raise _rank_error(error, output) from None
        if code:
            sys.exit(code)
        return
    _measure_rank(
        replace(config, layer_rounds=2, link_rounds=2, sizes_bytes=SIZES[:4]) if options.quick else config,
        options.as_json,
    )


def _measure_rank(config: ProfileConfig, as_json: bool) -> None:
    """Run one rank of the profile. Only rank 0 prints; the other ranks exit with the same code."""
    import os

    from pipefit.codec import dump_text
    from pipefit.profile.session import run_profile

    first = os.environ.get("RANK", "0") == "0"
    try:
        cluster = run_profile(config, PhaseProgress())
    except PipefitError as error:
        if first or (isinstance(error, RunError) and "Rank 0" in error.what):
            raise
        sys.exit(2)
    if first:
        _write_cluster(cluster, config.output, as_json, dump_text)


class PhaseProgress:
    """A progress line that is overwritten on a terminal; elsewhere one line per phase and per quarter of it."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._last = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        text = f"[{time.monotonic() - self.started:5.0f} s] {what}: {done} of {total}"
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{text:<76}", end=end, file=sys.stderr, flush=True)
            return
        quarter = 4 * done // max(1, total)
        if (what, quarter) != self._last:
            print(text, file=sys.stderr, flush=True)
            self._last = (what, quarter)


def _check_options(config: ProfileConfig, options: ProfileOptions) -> None:
    if options.files:
        raise PipefitError(
            "Files are read only with --from.",
            where="pipefit profile",
            seen=" ".join(options.files),
            next_step=f"name their format, for example --from nccl-tests {options.files[0]}",
        )
    _at_least(("--local", options.local, 0), ("--sequence", config.sequence, 16), ("--rounds", config.layer_rounds, 1))
    if config.dtype not in ("", *LAYER_DTYPES):
        raise PipefitError(
            "The dtype is unknown.", where="--dtype", seen=repr(config.dtype), allowed=", ".join(LAYER_DTYPES)
        )


def _at_least(*numbers: tuple[str, int, int]) -> None:
    """Raise an error for the first (option, value, least) whose value is too small."""
    for option, value, least in numbers:
        if value < least:
            raise PipefitError("The number is too small.", where=option, seen=value, allowed=f"{least} or more")


def _check_links(config: ProfileConfig) -> None:
    host_rounds, only = config.host_rounds, config.only
    _at_least(("--rails", config.rails, 1), ("--link-rounds", config.link_rounds, 1))
    if host_rounds not in ("auto", "all") and not (host_rounds.isdecimal() and int(host_rounds) >= 3):
        raise PipefitError(
            "The number of rounds of host pairs is invalid.",
            where="--host-rounds",
            seen=repr(host_rounds),
            allowed="auto, all, or a number, 3 or more",
        )
    if only not in ("", "links"):
        raise PipefitError("This part cannot be measured alone.", where="--only", seen=repr(only), allowed="links")
    if only and config.models:
        raise PipefitError(
            "The layers of a model are not measured with --only links.",
            where="--model",
            seen=", ".join(config.models),
            next_step="leave out --only or --model",
        )


def _rank_error(error: RunError, output: Path) -> ClusterError:
    from pipefit.profile.partial import partial_path

    partial = partial_path(output)
    partial_note = f"; the measurements so far are in {partial}" if partial.exists() else "; nothing was measured yet"
    return ClusterError(
        "This machine failed while it was measured: one of its processes died.",
        where=error.where,
        seen=f"{error.seen}{partial_note}",
        next_step="SIGKILL often means that the system ran out of memory: measure fewer processes, or --tokens fewer",
    )


def _write_cluster(cluster, output: Path, as_json: bool, dump_text) -> None:  # type: ignore[no-untyped-def]
    from pipefit.profile.summary import summarize_cluster

    if as_json:
        print(json.dumps(json.loads(dump_text(cluster))))
        return
    print(summarize_cluster(cluster))
    print(f"written to {output}")
