"""Published configurations of others, as models, clusters, jobs and `--fix` options of this planner.

`data/published_configurations.json` holds the facts and their sources. A GPT is planned as a GPT-2 of its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipefit.cluster import parse_spec
from pipefit.cluster.kinds import RESERVED_SHARE
from pipefit.cluster.types import Cluster
from pipefit.codec import from_data
from pipefit.plan.types import Job
from pipefit.precision import Precision

FILE = "published_configurations.json"

ASSUMED_NETWORK: Mapping[str, str] = {
    "A100-80": "1600Gbit/s",
    "GB200": "64x400Gbit/s",
    "GB300": "64x800Gbit/s",
}
"""Bandwidth of a host where the source does not give it, by device; `DEFAULT_NETWORK` for all others."""

FLOAT8 = ("float8", "mxfp8")
"""Precisions of rows that run the linear layers of blocks in eight bits; MXFP8 scales blocks of 32 numbers apart."""

DEFAULT_NETWORK = "3200Gbit/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSource:
    """A publication or a page of a repository."""

    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """Sizes of a model, or its name if it is built into pipefit."""

    source: str
    builtin: str = ""
    architecture: str = ""
    "`gpt`, or the model type of a Hugging Face config.json."
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDevice:
    """A device: the kind whose data sheet it has, and its differences from it."""

    kind: str
    source: str
    memory_gb: int | None = None
    memory_gb_per_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One configuration. None stands for a figure that the source does not give."""

    name: str
    model: str
    device: str
    hosts: int
    devices_per_host: int
    network: str | None
    "Bandwidth of a host."
    batch: int
    sequence: int
    precision: str
    dp: int
    tp: int
    sp: bool | None
    cp: int
    ep: int
    pp: int
    vp: int | None
    "Stages of a device."
    schedule: str | None
    mbs: int | None
    "Sequences of a microbatch on one replica."
    zero: int | None
    recompute: str | None
    step_s: float | None
    tokens_per_s_per_device: float | None
    tflops_per_s_per_device: float | None
    sources: tuple[str, ...]
    where: str
    note: str = ""
    gradients: str | None = None
    "Type in which gradients are added up and reduced; None: float32, or not said."

    @property
    def devices(self) -> int:
        return self.hosts * self.devices_per_host

    @property
    def family(self) -> str:
        """The publication or project, as in the beginning of the name."""
        return self.name.partition("-")[0]

    @property
    def job(self) -> Job:
        """The job in FP8, float16 or bfloat16."""
        narrow = self.gradients == "bfloat16"
        precision: Precision = "bfloat16-gradients" if narrow else "bfloat16"
        if self.precision == "float16":
            precision = "float16"
        if self.precision in FLOAT8:
            precision = "fp8-bfloat16-gradients" if narrow else "fp8"
        return Job(batch=self.batch, sequence=self.sequence, precision=precision)

    @property
    def request(self) -> tuple[Any, ...]:
        """Everything but the degrees: rows with equal requests have the same free plan."""
        return (self.model, self.device, self.hosts, self.devices_per_host, self.network, self.batch, self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """The whole file."""

    about: tuple[str, ...]
    sources: Mapping[str, PublishedSource] = field(default_factory=dict)
    models: Mapping[str, PublishedModel] = field(default_factory=dict)
    devices: Mapping[str, PublishedDevice] = field(default_factory=dict)
    rows: tuple[PublishedRow, ...] = ()


def shipped_text(name: str) -> str:
    """Return the text of a data file of this package."""
    return (files("pipefit.validate") / "data" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def read_published() -> PublishedFile:
    """Return the published configurations. Raises FormatError for a field of the wrong type."""
    return from_data(PublishedFile, json.loads(shipped_text(FILE)), FILE)


def constraint_texts(row: PublishedRow) -> tuple[str, ...]:
    """Return the `--fix` options of a row, in the field's names.

    Several stages of a device are a placement. If the source does not say how many there are, the devices of the plan
    are fixed instead, which fixes the devices of a pipeline.
    """
    texts = [f"dp={row.dp}", f"tp={row.tp}", f"cp={row.cp}"]
    if row.vp is None and row.pp > 1:
        texts.append(f"devices={row.devices}")
    elif row.vp is not None and row.vp > 1:
        texts.append("placement=" + ",".join(str(stage % row.pp) for stage in range(row.pp * row.vp)))
    else:
        texts.append(f"pp={row.pp}")
    if row.ep > 1:
        texts.append(f"ep={row.ep}")
    if row.sp is not None:
        texts.append(f"sp={str(row.sp).lower()}")
    named = {"schedule": row.schedule, "mbs": row.mbs, "zero": row.zero, "recompute": row.recompute}
    return (*texts, *(f"{key}={value}" for key, value in named.items() if value is not None))


def network_of(row: PublishedRow) -> str:
    """Return the bandwidth of a host, published or assumed."""
    return row.network or ASSUMED_NETWORK.get(row.device, DEFAULT_NETWORK)


def equal_hosts(hosts: int, devices_per_host: int, kind: str, network: str) -> Cluster:
    """Return a cluster of equal hosts from its short form. Raises ClusterError for an unknown kind."""
    host = f"{devices_per_host}x{kind}"
    return parse_spec(host if hosts == 1 else f"{hosts}x{host}:{network}")


def cluster_of(row: PublishedRow, file: PublishedFile) -> Cluster:
    """Return the cluster of a row. Raises ClusterError if no data sheet of the device is known."""
    device = file.devices[row.device]
    cluster = equal_hosts(row.hosts, row.devices_per_host, device.kind, network_of(row))
    kinds = {}
    for name, kind in cluster.kinds.items():
        if device.memory_gb is not None:
            kind = replace(kind, memory_bytes=round(device.memory_gb * 1e9 * (1 - RESERVED_SHARE)))
        if device.memory_gb_per_s is not None:
            kind = replace(kind, memory_bandwidth_bytes_per_s=device.memory_gb_per_s * 1e9)
        kinds[name] = kind
    return replace(cluster, kinds=kinds)


def model_source(row: PublishedRow, file: PublishedFile, folder: Path) -> str:
    """Return `write_model` of a configuration."""
    return write_model(row.model, file.models[row.model], row.sequence, folder)


def write_model(name: str, model: PublishedModel, sequence: int, folder: Path) -> str:
    """Return the name of a model that pipefit knows, or the configuration file that is written into the folder."""
    if model.builtin:
        return model.builtin
    path = folder / f"{name}-{max(sequence, model.positions)}.json"
    path.write_text(json.dumps(model_config(model, sequence)), encoding="utf-8")
    return str(path)


def model_config(model: PublishedModel, sequence: int) -> dict[str, Any]:
    """Return the fields of a Hugging Face config.json that the sizes of a model give."""
    if model.architecture == "gpt":
        return {
            "model_type": "gpt2",
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_positions": max(sequence, model.positions),
            "vocab_size": model.vocabulary,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    config: dict[str, Any] = {
        "model_type": model.architecture,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocabulary,
        "num_local_experts": model.experts if model.architecture == "mixtral" else 0,
        "num_experts": model.experts if model.architecture != "mixtral" else 0,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_intermediate,
    }
    config = {key: value for key, value in config.items() if value}
    config["max_position_embeddings"] = max(sequence, model.positions)
    return config


def published_step_s(row: PublishedRow, file: PublishedFile) -> float | None:
    """Return the step time that a row gives: itself, or by tokens or operations per second.

    The operations of a step are known for the SC21 paper only (its equation 3, recomputation included).
    """
    if row.step_s is not None:
        return row.step_s
    if row.tokens_per_s_per_device is not None:
        return row.batch * row.sequence / (row.tokens_per_s_per_device * row.devices)
    if row.tflops_per_s_per_device is None or "sc21" not in row.sources:
        return None
    model, length = file.models[row.model], row.sequence
    layers, hidden, vocabulary = model.layers, model.hidden, model.vocabulary
    terms = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = 96 * row.batch * length * layers * hidden**2 * terms
    return flops / (row.tflops_per_s_per_device * 1e12 * row.devices)
