"""`pipefit shard`: search the program with which one group of devices runs a model, operator by operator, with its
cost."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipefit.cli._options import takes_options
from pipefit.errors import PlanError
from pipefit.precision import COMPUTE_TYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """Options of `pipefit shard`."""

    model: str
    "A built-in model, a directory or file, or FILE.py:FUNCTION."
    cluster: str | None = None
    "A cluster file, or a short text such as 8xH100."
    local: int | None = None
    "This machine as the cluster, with this many processes."
    devices: str | None = None
    "Device numbers of the group, with commas. Default: all."
    shares: str | None = None
    "Shares of the devices, such as 2:1. Default: searched."
    batch: int = 32
    "Rows of a step."
    seq: int | None = None
    "Tokens of a row. Default: 1024, or the length of a captured model."
    microbatches: int = 1
    "Microbatches of a step."
    precision: str = "bfloat16"
    """bfloat16 (gradients in float32), bfloat16-gradients, fp8 (bfloat16 with the linear layers of blocks in FP8),
    fp8-bfloat16-gradients, float16, tf32, float32 or float64."""
    as_json: bool = False
    "Print the program and its costs as JSON."


@takes_options(ShardOptions)
def command(options: ShardOptions) -> None:
    """Search the program of a group of devices: tensor forms, shares, collectives, costs."""
    from pipefit.cli._plans import cluster_text
    from pipefit.cluster import open_cluster
    from pipefit.cluster.files import check_peaks
    from pipefit.codec import to_data
    from pipefit.cost.comm.network import Network
    from pipefit.cost.compute.curves import best_costs
    from pipefit.model.registry import open_model
    from pipefit.plan.assemble.shard_recipes import shard_setting
    from pipefit.plan.request.sequence_length import check_length, fixed_length, resolve_length
    from pipefit.shard.apart import check_row_independence
    from pipefit.shard.chain import ChainSearch
    from pipefit.shard.listing import list_program
    from pipefit.shard.segments import segment_shares
    from pipefit.shard.synthesize import synthesize_program

    opened_cluster = open_cluster(cluster_text(options.cluster, options.local))
    network = Network(opened_cluster)
    chosen = _parse_devices(options.devices, network.devices)
    given_shares = _parse_shares(options.shares, len(chosen))
    opened_model = open_model(options.model, options.seq)
    seq = 1024 if options.seq is None and fixed_length(opened_model) is None else options.seq
    tokens = resolve_length(opened_model, seq)
    _check_sizes(options, tokens)
    check_peaks(opened_cluster, options.precision, "--precision")  # type: ignore[arg-type]
    layers = opened_model.layers
    if len(opened_model.modules) > 1:
        raise PlanError(
            "Programs are searched for models of one module.",
            where="--model",
            seen=", ".join(module.name for module in opened_model.modules),
        )
    check_length(opened_model.modules[0], opened_model, tokens, "--seq")
    check_row_independence(opened_model)
    setting = shard_setting(
        opened_model,
        network,
        best_costs(opened_cluster),
        devices=chosen,
        rows=options.batch // options.microbatches,
        tokens=tokens,
        precision=options.precision,  # type: ignore[arg-type]
        microbatches=options.microbatches,
    )
    chains = ChainSearch(opened_model, setting)
    program = synthesize_program(chains, layers, given_shares)
    result = list_program(
        opened_model, layers, program if given_shares else segment_shares(chains, layers, program), setting
    )
    if options.as_json:
        print(json.dumps(to_data(result), indent=1))
    else:
        print(result.listing_text(), end="")


def _parse_devices(text: str | None, count: int) -> tuple[int, ...]:
    """Return the devices of the group."""
    if text is None:
        chosen = tuple(range(count))
    else:
        try:
            chosen = tuple(int(part) for part in text.split(","))
        except ValueError:
            chosen = ()
    if len(chosen) < 2 or len({*chosen}) != len(chosen) or not all(0 <= device < count for device in chosen):
        raise PlanError(
            "A group is two or more different devices of the cluster.",
            where="--devices",
            seen=text if text is not None else f"all {count}",
            allowed=f"numbers of 0 to {count - 1}, with commas",
        )
    return chosen


def _parse_shares(text: str | None, count: int) -> tuple[int, ...]:
    """Return the given shares, or () if they are to be searched."""
    if text is None:
        return ()
    parts = text.split(":")
    if len(parts) != count or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise PlanError(
            "Shares are positive whole numbers, one for each device.",
            where="--shares",
            seen=text,
            allowed=f"{count} numbers, for example {':'.join(['2', *['1'] * (count - 1)])}",
        )
    return tuple(map(int, parts))


def _check_sizes(options: ShardOptions, tokens: int) -> None:
    batch, microbatches, precision = options.batch, options.microbatches, options.precision
    if microbatches < 1 or batch < 1 or batch % microbatches:
        raise PlanError(
            "The batch cannot be cut into this many equal microbatches.",
            where="--batch, --microbatches",
            seen=f"batch {batch}, microbatches {microbatches}",
            allowed="a positive batch, and a divisor of it",
        )
    if tokens < 1:
        raise PlanError("A row has at least one token.", where="--seq", seen=tokens)
    if precision not in COMPUTE_TYPE:
        raise PlanError(
            "This precision is not known.", where="--precision", seen=precision, allowed=", ".join(sorted(COMPUTE_TYPE))
        )
