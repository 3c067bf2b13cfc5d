"""The plan: every decision of a run and every prediction made for it, as one JSON file that all ranks hash.

These types carry every kind of run that pipefit knows: uneven replicas and shards, V placements, slices, tied
parameters, split optimizer state, modules with their own layouts. `plan/check/rules.py` says what makes a plan valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipefit.codec import content_digest
from pipefit.layout import Mesh, MeshAxis
from pipefit.schedule.actions import EVERY, RoundRobin, Schedule, parse_lanes

Recompute = Literal["none", "selective", "full"]
Precision = Literal["float64", "float32", "bfloat16"]
Documents = Literal["joined", "apart"]
Divide = Literal["samples", "images"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """An axis as it stands in a plan file."""

    name: Literal["replica", "shard", "context", "expert"]
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A group as it stands in a plan file."""

    axes: tuple[AxisPlan, ...]
    devices: tuple[int, ...]

    def to_mesh(self) -> Mesh:
        axes = tuple(MeshAxis(name=axis.name, shares=axis.shares) for axis in self.axes)
        return Mesh(axes=axes, devices=self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpace:
    """What rows are, and how many of them a step has."""

    name: str
    "`samples`, `images`, `patches`, ..."
    rows: int
    "Rows of one step (the global batch for samples)."
    tokens: int
    "Tokens of one row; 0 where rows differ and the step plan knows."
    counts: tuple[int, ...] = ()
    "Where rows differ: tokens of each, in the order of one sampled batch, the one that predictions are made for."
    squares: tuple[int, ...] = ()
    "Of each of them, the sum over its images of their tokens squared."
    images: tuple[tuple[int, ...], ...] = ()
    "Of each of them, the tokens of its images; () where that is not known, and no stage divides images."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of consecutive layers of one module, held by one group."""

    module: str
    layers: tuple[int, int]
    "Half-open range of layer indices within the module."
    group: int
    space: str = "samples"
    recompute: Recompute = "none"
    sharding: Literal["none", "megatron", "megatron-sp", "searched"] = "none"
    "The SPMD program over the group's shard axis; `searched`: by the plan's recipes."
    recipes: str = ""
    "Of a searched sharding, the name of its set among the plan's recipes; '': the unnamed one."
    program: str = ""
    "Hash of the operator graph after sharding; '' in a plan written by hand (then ranks only check each other)."
    microbatch_multiple: int = 1
    "How many of the schedule's microbatches this stage's module takes together."
    divide: Divide = "samples"
    "What the replicas of a packed stage divide among them: the microbatch's samples, or its images (`image_split.py`)."
    turn: int = 0
    "Of the stages that hold the same layers on lanes of their own and take turns, which this is."
    turns: int = 1
    "How many take turns: unit u of the module's microbatches is this stage's where u % turns == turn."


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTransfer:
    """How one direction of an edge crosses: forms along the axes of the source and target groups, as text."""

    sent: tuple[str, ...]
    "As the sender holds the tensor."
    wire: tuple[str, ...]
    "As it leaves the sender, after a conversion within the sender's group (free where it equals `sent`)."
    received: tuple[str, ...]
    "As the receiver gets it, in its own group's axes."


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor that stage `source` makes and stage `target` uses. Any DAG; skips allowed."""

    source: int
    target: int
    tensor: str = ""
    "'' is the hidden state."
    forward: EdgeTransfer
    gradient: EdgeTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter tensor of the model, by its global name."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    uses: tuple[int, ...]
    "Stages that use it; two for tied embeddings."
    stored: tuple[str, ...]
    "Form along each axis of the owner's group as the parameter is stored for use."
    state: tuple[str, ...]
    "Form of its optimizer state: `Gflat` along an axis is ZeRO-1's split over that axis."
    owner: int
    "The stage that counts it in the global norm and saves it: one of `uses`."


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """The schedule as it stands in a plan file."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    slices: tuple[int, ...]
    "Token count of each slice; one entry where sequences are not cut."
    lanes: tuple[str, ...]
    "Lowered actions of every lane, as text."

    def to_schedule(self, turns: tuple[RoundRobin, ...] = ()) -> Schedule:
        """The schedule that the lines stand for, `turns` as `Schedule` has it (`Plan.to_schedule` knows). Raises
        ScheduleError at the first word that is no action."""
        return Schedule(
            name=self.name,
            placement=self.placement,
            microbatches=self.microbatches,
            slices=len(self.slices),
            lanes=parse_lanes(self.lanes),
            turns=turns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked for: the part that a plan depends on."""

    batch: int
    "Sequences of one step, over all replicas."
    sequence: int
    "Tokens of one sequence."
    precision: Precision = "float32"
    seed: int = 0
    documents: Documents = "joined"
    "Whether attention crosses the documents that are packed into one sequence, or keeps them apart."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """What samples cost on one stage: forward seconds on a replica with an average share."""

    space: str
    row_s: float = 0.0
    "Of a row, whatever it holds."
    token_s: float = 0.0
    "Of a token of the space."
    square_s: float = 0.0
    "Of the square of an image's tokens: attention within it."
    backward: float = 2.0
    "The backward pass in forward passes: 0 where there is none, about 1 for input gradients alone, else about 2."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleArrangement:
    """How the samples of a batch are given to replicas and microbatches, where they differ."""

    balance: bool = True
    "Whether samples change between replicas and microbatches, so that none has much more than others."
    order: bool = True
    "Whether microbatches change places in their pipeline."
    swaps: int = 250
    "Exchanges of microbatches that are tried on the simulator."
    loads: tuple[SampleLoad, ...] = ()
    "Of every stage."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRisk:
    """What a memory correction (docs/memory.md) makes of a lane's peak, on the device that is likeliest to overflow."""

    expected_bytes: float
    "The peak, corrected."
    margin_bytes: float
    "What may come on top of it, hardly ever more."
    risk: float
    "The probability that it takes more than the limit."


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPrediction:
    """What the devices of one kind need on a lane whose kinds hold different amounts: the fullest of them."""

    kind: str
    devices: tuple[int, ...]
    peak_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePrediction:
    """What the simulator says of one lane; its memory is that of the device that is fullest for its limit."""

    peak_bytes: float
    limit_bytes: float
    static_bytes: float
    busy_s: float
    idle_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    "Bytes by what they are: parameters, gradients, optimizer, activations, buffers, workspace."
    memory: MemoryRisk | None = None
    "Where a correction for its devices is known."
    kind: str = ""
    "Of the fullest device, where the lane's kinds of devices hold different amounts."
    others: tuple[KindPrediction, ...] = ()
    "The other kinds then, the fullest for its limit first."

    @property
    def least_limit_bytes(self) -> float:
        """Of the smallest device."""
        return min([self.limit_bytes, *(other.limit_bytes for other in self.others)])

    def for_device(self, device: int) -> KindPrediction:
        """What is said of one of the lane's devices, by its number in the cluster."""
        own = KindPrediction(kind=self.kind, devices=(), peak_bytes=self.peak_bytes, limit_bytes=self.limit_bytes)
        return next((other for other in self.others if device in other.devices), own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSensitivity:
    """What a better cluster would give."""

    change: str
    "In words: `links twice as fast`, `one more host`."
    step_s: float
    "The step with it; never above the prediction where plans were searched again."
    how: str
    "Whether the same plan was simulated again, or planned again, and with what held."


@dataclass(frozen=True, slots=True, kw_only=True)
class TradePoint:
    """What the plan's layout would need and take with another order or other recomputation."""

    schedule: str
    recompute: str
    "One for all stages, or one per stage with commas."
    memory_bytes: float
    "What the lane that is fullest for its limit fills of it, in bytes of the smallest limit: no point with more fits."
    step_s: float
    fits: bool = True
    "Every lane, into what the search kept to: its devices' memory, or what a memory correction makes of that."
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """What the simulator says of the plan."""

    step_s: float
    compute_s: float
    "Busy time of the busiest lane."
    tokens_per_s: float
    flops_per_step: float
    "Model FLOPs of one step, without recomputation."
    lanes: tuple[LanePrediction, ...]
    lower_bound_s: float = 0.0
    "Of every plan considered, with replicas that keep step; 0 where there is none."
    binds: str = ""
    "What limits it: compute of a stage, a link, or memory."
    assumptions: tuple[str, ...] = ()
    sensitivity: tuple[ClusterSensitivity, ...] = ()
    trade: tuple[TradePoint, ...] = ()
    "Memory against time on the plan's layout, by memory; empty for a single lane."
    risk: float | None = None
    "The probability that some lane does not fit, as if lanes erred independently; None without a memory correction."


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativePlan:
    """A runner-up, and why it lost or did not fit."""

    decisions: Mapping[str, str]
    step_s: float
    peak_bytes: float
    limit_bytes: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHashes:
    """What the plan was made for; a plan is stale when one of these changed."""

    model: str
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Enough to build the model again."""

    name: str
    "What the user typed: a directory, a file or a built-in name."
    family: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions of a run and all predictions made for it."""

    version: int
    job: Job
    model: ModelSource
    groups: tuple[MeshPlan, ...]
    spaces: tuple[SampleSpace, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    parameters: tuple[ParameterPlan, ...]
    order: SchedulePlan
    prediction: PlanPrediction | None = None
    alternatives: tuple[AlternativePlan, ...] = ()
    hashes: InputHashes
    decisions: Mapping[str, str] = field(default_factory=dict)
    "The choices in words: replicas, stages, schedule, ...: what `--fix` can pin."
    cluster: str = ""
    "What the user typed for the cluster: a file, a short text such as `8xH100`, or `local:4`; '' where unknown."
    recipes: Mapping[str, str] = field(default_factory=dict)
    "Of searched shardings: how every distinct layer is split (`shard/recipe.py`), by the key of its graph; with the"
    " name of the set and a slash in front where that has one."
    arranging: SampleArrangement | None = None
    "Where samples differ in what they cost; None: they are taken as they come."

    @property
    def content_hash(self) -> str:
        """The digest that every rank compares before it starts."""
        return content_digest(self)

    @property
    def used_devices(self) -> tuple[int, ...]:
        """The devices that take part, in cluster order: rank i of the run is the i-th of these."""
        return tuple(sorted({device for group in self.groups for device in group.devices}))

    def to_schedule(self) -> Schedule:
        """The schedule of the order's lines, with what every stage takes of it. Raises ScheduleError as they do."""
        return self.order.to_schedule(collect_turns(self.stages))

    def stage_mesh(self, stage: int) -> Mesh:
        """The group that holds a stage."""
        return self.groups[self.stages[stage].group].to_mesh()

    def lane_mesh(self, lane: int) -> Mesh:
        """The group of the stages that lane holds; where some take turns with those of other lanes, of the others."""
        held = [stage for stage, other in enumerate(self.order.placement) if other == lane]
        return self.stage_mesh(min(held, key=lambda stage: (self.stages[stage].turns > 1, stage)))


def collect_turns(stages: Sequence[Stage]) -> tuple[RoundRobin, ...]:
    """Which microbatches every stage takes, as schedules have it: () where all take all, one by one."""
    turns = tuple(RoundRobin(stage.turn, stage.turns, stage.microbatch_multiple) for stage in stages)
    return () if all(turn == EVERY for turn in turns) else turns
