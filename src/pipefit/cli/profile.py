"""`pipefit profile`: measure the machines, or read the output of other tools, and write a cluster file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pipefit.errors import ClusterError, PipefitError, RunError


def command(
    files: Annotated[list[str] | None, typer.Argument(help="With --from: files (or a node list) to read.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The cluster file to write.")] = Path("cluster.json"),
    local: int = typer.Option(0, help="Start this many processes on this machine and measure them as one host."),
    model: Annotated[
        list[str] | None, typer.Option(help="Measure the layers of this model too; repeatable. A name or directory.")
    ] = None,
    sequence: int = typer.Option(1024, help="Tokens of the longest sequence that layers are measured at."),
    tokens: int = typer.Option(0, help="Tokens of the largest microbatch on one device; 0: eight sequences."),
    dtype: str = typer.Option("", help="Dtype of the layers: float32, bfloat16 or float64. Default: by device."),
    name: str = typer.Option("", help="Name of the cluster. Default: the name of the file."),
    rails: int = typer.Option(1, help="Networks between the hosts; a host's devices use them in turn."),
    rounds: int = typer.Option(5, help="Repetitions of every measured layer."),
    link_rounds: int = typer.Option(3, help="Repetitions of every measured link."),
    host_rounds: str = typer.Option(
        "auto",
        help="Rounds of host pairs: a number, all, or auto: until the rest can be inferred from the measured links.",
    ),
    only: str = typer.Option("", help="links: measure neither layers nor collectives."),
    quick: bool = typer.Option(False, "--quick", help="Fewer repetitions and sizes: a first look."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    timeout: float = typer.Option(60.0, help="Seconds without an answer after which a host has failed."),
    source: str = typer.Option("", "--from", help="Read another tool's output instead of measuring: see the docs."),
    devices: str = typer.Option("", help="With --from, if not in the files: devices of a host, such as 8xH100."),
    network: str = typer.Option("", help="With --from, if not in the files: bandwidth of a host, such as 200Gbit/s."),
    as_json: bool = typer.Option(False, "--json", help="Print the cluster as JSON as well."),
) -> None:
    """Measure hosts, links and layers, and write a cluster file: alone, with --local N, or under torchrun."""
    from pipefit.codec import dump_text, make_folder

    make_folder(output, "cluster file", ClusterError)
    if source:
        from pipefit.cluster.files import save_cluster_file
        from pipefit.cluster.readers import read_cluster

        cluster = read_cluster(source, files or [], devices=devices, network=network)
        save_cluster_file(cluster, output)
        _write_cluster(cluster, output, as_json, dump_text)
        return
    _check_options(files, local, sequence, rounds, dtype)
    _check_links(rails, link_rounds, host_rounds, only, model or [])
    from pipefit.run.session.launch import run_local
    from pipefit.run.session.rendezvous import under_torchrun

    if local > 1 and not under_torchrun():
        try:
            code = run_local(local, sys.argv[1:])
        except RunError as error:
            raise _rank_error(error, output) from None
        if code:
            sys.exit(code)
        return
    _measure_rank(
        output,
        model or [],
        sequence,
        tokens,
        dtype,
        name,
        rails,
        rounds,
        link_rounds,
        host_rounds,
        only,
        quick,
        device,
        timeout,
        as_json,
    )


def _measure_rank(
    output: Path, model: list[str], sequence: int, tokens: int, dtype: str, name: str, rails: int, rounds: int,
    link_rounds: int, host_rounds: str, only: str, quick: bool, device: str, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Run one rank of the profile. Only rank 0 prints; the other ranks exit with the same code."""
    import os

    from pipefit.codec import dump_text
    from pipefit.profile.links import SIZES
    from pipefit.profile.session import run_profile
    from pipefit.profile.state import ProfileConfig

    config = ProfileConfig(
        output=output, name=name, models=tuple(model), sequence=sequence, tokens=tokens, dtype=dtype, rails=rails,
        layer_rounds=2 if quick else rounds, link_rounds=2 if quick else link_rounds,
        sizes_bytes=SIZES[:4] if quick else SIZES, host_rounds=host_rounds, only=only, device=device, timeout_s=timeout,
    )  # fmt: skip
    first = os.environ.get("RANK", "0") == "0"
    try:
        cluster = run_profile(config, PhaseProgress())
    except PipefitError as error:
        if first or (isinstance(error, RunError) and "Rank 0" in error.what):
            raise
        sys.exit(2)
    if first:
        _write_cluster(cluster, output, as_json, dump_text)


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


def _check_options(files: list[str] | None, local: int, sequence: int, rounds: int, dtype: str) -> None:
    if files:
        raise PipefitError(
            "Files are read only with --from.",
            where="pipefit profile",
            seen=" ".join(files),
            next_step=f"say what they are, for example --from nccl-tests {files[0]}",
        )
    _at_least(("--local", local, 0), ("--sequence", sequence, 16), ("--rounds", rounds, 1))
    if dtype not in ("", "float32", "bfloat16", "float64"):
        raise PipefitError(
            "The dtype is unknown.", where="--dtype", seen=repr(dtype), allowed="float32, bfloat16, float64"
        )


def _at_least(*numbers: tuple[str, int, int]) -> None:
    """Raise an error for the first (option, value, least) whose value is too small."""
    for option, value, least in numbers:
        if value < least:
            raise PipefitError("The number is too small.", where=option, seen=value, allowed=f"{least} or more")


def _check_links(rails: int, link_rounds: int, host_rounds: str, only: str, model: list[str]) -> None:
    _at_least(("--rails", rails, 1), ("--link-rounds", link_rounds, 1))
    if host_rounds not in ("auto", "all") and not (host_rounds.isdecimal() and int(host_rounds) >= 3):
        raise PipefitError(
            "The number of rounds of host pairs is invalid.",
            where="--host-rounds",
            seen=repr(host_rounds),
            allowed="auto, all, or a number, 3 or more",
        )
    if only not in ("", "links"):
        raise PipefitError("This part cannot be measured alone.", where="--only", seen=repr(only), allowed="links")
    if only and model:
        raise PipefitError(
            "The layers of a model are not measured with --only links.",
            where="--model",
            seen=", ".join(model),
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
