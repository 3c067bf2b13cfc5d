"""The plan: every decision of a run and its predictions, as one JSON file that all ranks hash.

These types carry every kind of run that pipefit knows: uneven replicas and shards, V placements, slices, tied
parameters, sharded optimizer state, and modules with separate layouts. The rules of a valid plan are in
`plan/check/rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipefit.codec import added_later, content_digest, translated
from pipefit.layout import Mesh, MeshAxis
from pipefit.model.analysis.saved import Recompute as Recompute
from pipefit.optimizers import DEFAULT
from pipefit.optimizers.sharded_state import decode_decisions, encode_decisions
from pipefit.precision import Precision
from pipefit.schedule.actions import EVERY, RoundRobin, Schedule, parse_lanes

Documents = Literal["joined", "apart"]
Divide = Literal["samples", "images"]

LEGACY_DECISIONS = translated(encode_decisions, decode_decisions)
"""Plan files hold `zero1` for `sharded_state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """A mesh axis as it stands in a plan file."""

    name: Literal["replica", "shard", "context", "expert"]
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A mesh of devices as it stands in a plan file."""

    axes: tuple[AxisPlan, ...]
    devices: tuple[int, ...]

    def to_mesh(self) -> Mesh:
        axes = tuple(MeshAxis(name=axis.name, shares=axis.shares) for axis in self.axes)
        return Mesh(axes=axes, devices=self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpace:
    """A kind of rows, with their number and size in one step."""

    name: str
    "`samples`, `images`, `patches`, ..."
    rows: int
    "Rows of one step (the global batch for samples)."
    tokens: int
    "Tokens of one row; 0 where rows differ and the step plan gives them."
    counts: tuple[int, ...] = ()
    "If rows differ: tokens of each row of one sampled batch, in its order. Predictions are made for this batch."
    squares: tuple[int, ...] = ()
    "For each row, the sum over its images of their squared token counts."
    images: tuple[tuple[int, ...], ...] = ()
    "For each row, the tokens of its images; () if unknown, in which case no stage divides images."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of consecutive layers of one module on one mesh of devices."""

    module: str
    layers: tuple[int, int]
    "Half-open range of layer indices within the module."
    group: int
    space: str = "samples"
    recompute: Recompute = "none"
    sharding: Literal["none", "megatron", "megatron-sp", "expert", "searched"] = "none"
    "The SPMD program over the shard axis; `expert`: expert parallelism; `searched`: by the plan's recipes."
    recipes: str = ""
    "For searched sharding, the name of the stage's recipe set; '' is the unnamed set."
    program: str = ""
    "Hash of the sharded operator graphs; '' in a plan written by hand (then ranks only check each other)."
    microbatch_multiple: int = 1
    "Microbatches of the schedule that the stage's module processes per call."
    divide: Divide = "samples"
    "Unit that the replicas of a packed stage divide: the samples of a microbatch, or its images (`image_split.py`)."
    turn: int = 0
    "Index of this stage among the stages that hold the same layers and process microbatches round-robin."
    turns: int = 1
    "Number of those stages: unit u of the module's microbatches belongs to the stage with u % turns == turn."
    state_group: int = added_later(0)
    """Number of neighbours among the replicas (and the parts of their sequences) that shard the stage's state together;
    other groups hold copies (HSDP). 0: all of them, one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTransfer:
    """Transfer of a tensor in one direction of an edge: its forms along the axes of the source and target meshes, as
    text."""

    sent: tuple[str, ...]
    "Forms in which the sender holds the tensor."
    wire: tuple[str, ...]
    "Forms in which it leaves the sender, after a conversion within the sender's mesh (free if equal to `sent`)."
    received: tuple[str, ...]
    "Forms in which the receiver gets it, along the axes of its mesh."


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor produced by stage `source` and used by stage `target`. Any DAG is allowed, skip connections included."""

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
    "Form along each axis of the owner's mesh, as stored for use."
    state: tuple[str, ...]
    """Form of its optimizer state. `Gflat` along an axis is ZeRO-1 sharding over that axis, `Gflat:gradients` ZeRO-2,
    `Gflat:parameters` ZeRO-3."""
    owner: int
    "The stage that counts it in the gradient norm and saves it: one of `uses`."


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """The schedule as it stands in a plan file."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    slices: tuple[int, ...]
    "Token count of each slice; one entry if sequences are not sliced."
    lanes: tuple[str, ...]
    "Lowered actions of every lane, as text."

    def to_schedule(self, turns: tuple[RoundRobin, ...] = ()) -> Schedule:
        """Return the schedule, with `turns` as in `Schedule` (`Plan.to_schedule` supplies them). Raises ScheduleError
        at the first word that is not an action."""
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
    """The requested training job: the part that a plan depends on."""

    batch: int
    "Sequences of one step, over all replicas."
    sequence: int
    "Tokens of one sequence."
    precision: Precision = "float32"
    seed: int = 0
    optimizer: str = added_later(DEFAULT)
    "A name of `optimizers.OPTIMIZERS`."
    documents: Documents = "joined"
    "`joined`: attention crosses the documents packed into one sequence; `apart`: it does not."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """Cost of samples on one stage: forward seconds on a replica with an average share."""

    space: str
    row_s: float = 0.0
    "Per row, whatever its size."
    token_s: float = 0.0
    "Per token of the space."
    square_s: float = 0.0
    "Per squared token count of an image: attention within it."
    backward: float = 2.0
    "Cost of the backward pass relative to forward: 0 without one, about 1 for input gradients alone, else about 2."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleArrangement:
    """Rules for assigning unequal samples of a batch to replicas and microbatches."""

    balance: bool = True
    "Move samples between replicas and microbatches to even out their load."
    order: bool = True
    "Reorder microbatches within their pipeline."
    swaps: int = 250
    "Exchanges of microbatches tried on the simulator."
    loads: tuple[SampleLoad, ...] = ()
    "One per stage."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRisk:
    """Corrected peak memory of a lane (docs/design/memory.md), on the device most likely to overflow."""

    expected_bytes: float
    "The corrected peak."
    margin_bytes: float
    "Margin on top of it that is hardly ever exceeded."
    risk: float
    "Probability that the peak exceeds the limit."


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPrediction:
    """Peak memory of one device kind on a lane whose kinds hold different amounts: its fullest device."""

    kind: str
    devices: tuple[int, ...]
    peak_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePrediction:
    """The simulator's figures for one lane. Its memory is that of the device that is fullest relative to its limit."""

    peak_bytes: float
    limit_bytes: float
    static_bytes: float
    busy_s: float
    idle_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    "Bytes by part: parameters, gradients, optimizer, activations, buffers, workspace."
    memory: MemoryRisk | None = None
    "Set if a correction for its devices is known."
    kind: str = ""
    "Kind of the fullest device, if the lane's device kinds hold different amounts."
    others: tuple[KindPrediction, ...] = ()
    "The remaining kinds in that case, the fullest relative to its limit first."

    @property
    def least_limit_bytes(self) -> float:
        """Memory of the smallest device."""
        return min([self.limit_bytes, *(kind.limit_bytes for kind in self.others)])

    def for_device(self, device: int) -> KindPrediction:
        """Return the prediction for one of the lane's devices, by its number in the cluster."""
        fullest = KindPrediction(kind=self.kind, devices=(), peak_bytes=self.peak_bytes, limit_bytes=self.limit_bytes)
        return next((kind for kind in self.others if device in kind.devices), fullest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSensitivity:
    """Predicted gain from a better cluster."""

    change: str
    "The change in words: `links twice as fast`, `one more host`."
    step_s: float
    "The step time after the change; never above the prediction if plans were searched again."
    how: str
    "The method: the same plan simulated again, or a new search and its constraints."


@dataclass(frozen=True, slots=True, kw_only=True)
class TradePoint:
    """Memory and step time of the plan's layout with another order or other recomputation."""

    schedule: str
    recompute: str
    "One value for all stages, or one per stage with commas."
    memory_bytes: float
    "The largest filled share of any lane's limit, times the smallest limit: a point that exceeds it does not fit."
    step_s: float
    fits: bool = True
    "Every lane fits the limits of the search: device memory, or the corrected limits."
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """The simulator's figures for the whole plan."""

    step_s: float
    compute_s: float
    "Busy time of the busiest lane."
    tokens_per_s: float
    flops_per_step: float
    "Model FLOPs of one step, without recomputation."
    lanes: tuple[LanePrediction, ...]
    lower_bound_s: float = 0.0
    "Lower bound of all plans considered, with replicas in lockstep; 0 if unknown."
    binds: str = ""
    "The critical path: compute of stages, links, or memory."
    assumptions: tuple[str, ...] = ()
    sensitivity: tuple[ClusterSensitivity, ...] = ()
    trade: tuple[TradePoint, ...] = ()
    "Memory against step time for the plan's layout, by memory; empty for a single lane."
    risk: float | None = None
    "Probability that any lane does not fit, with independent errors per lane; None without a memory correction."


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativePlan:
    """A runner-up, with the reason why it lost or did not fit."""

    decisions: Mapping[str, str] = field(metadata=LEGACY_DECISIONS)
    step_s: float
    peak_bytes: float
    limit_bytes: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHashes:
    """Hashes of the model and the cluster; the plan is stale if one of them changed."""

    model: str
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The data needed to build the model again."""

    name: str
    "The text that the user typed: a directory, a file or a built-in name."
    family: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions of a run and all its predictions."""

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
    decisions: Mapping[str, str] = field(default_factory=dict, metadata=LEGACY_DECISIONS)
    "The choices in words (replicas, stages, schedule, ...), under the keys of `--fix`."
    cluster: str = ""
    "The text that the user typed for the cluster: a file, a text such as `8xH100`, or `local:4`; '' if unknown."
    recipes: Mapping[str, str] = field(default_factory=dict)
    """Recipes of searched shardings (`shard/recipe.py`), one for each distinct layer, by the key of its graph. A named
    set has its name and a slash in front of the key."""
    arranging: SampleArrangement | None = None
    "Set if samples differ in cost; None: samples are taken in their order."

    @property
    def content_hash(self) -> str:
        """The digest that every rank compares before it starts."""
        return content_digest(self)

    @property
    def used_devices(self) -> tuple[int, ...]:
        """The devices of the plan in cluster order: rank i of the run is the i-th of them."""
        return tuple(sorted({device for group in self.groups for device in group.devices}))

    def to_schedule(self) -> Schedule:
        """Return the schedule with the round-robin turns of every stage. Raises ScheduleError as
        `SchedulePlan.to_schedule` does."""
        return self.order.to_schedule(collect_turns(self.stages))

    def stage_mesh(self, stage: int) -> Mesh:
        """Return the mesh of a stage."""
        return self.groups[self.stages[stage].group].to_mesh()

    def lane_mesh(self, lane: int) -> Mesh:
        """Return the mesh of the lane's stages. Stages that take turns with other lanes count only if there are no
        others."""
        held = [stage for stage, stage_lane in enumerate(self.order.placement) if stage_lane == lane]
        return self.stage_mesh(min(held, key=lambda stage: (self.stages[stage].turns > 1, stage)))


def collect_turns(stages: Sequence[Stage]) -> tuple[RoundRobin, ...]:
    """Return the round-robin turns of all stages; () if every stage takes every microbatch, one by one."""
    turns = tuple(RoundRobin(stage.turn, stage.turns, stage.microbatch_multiple) for stage in stages)
    return () if all(turn == EVERY for turn in turns) else turns
