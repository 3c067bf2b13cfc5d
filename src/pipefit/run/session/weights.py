"""First and final weights of a run: files of Hugging Face and of PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.errors import ModelError, RunError
from pipefit.model.adapters.adapt import count_elements
from pipefit.model.adapters.options import read_adapters
from pipefit.model.adapters.targets import is_adapter
from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.config import TrainConfig
from pipefit.run.session.rendezvous import World
from pipefit.run.session.write_errors import write_errors
from pipefit.run.stage.initial_values import ParameterValue, initial_values
from pipefit.run.stage.user_module import UserModel
from pipefit.run.worker.state import MODEL, model_pieces
from pipefit.run.worker.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

OWN_WEIGHTS = "model"
"""The text of `--weights` for the files in the plan's model directory."""

FULL, ADAPTER = "weights", "adapter"
"""Folders of a run with the parameters of the complete model, and with its adapters alone."""


FINAL_WORDS = {FULL: "weights", ADAPTER: "adapter"}
"""Contents of these folders in words."""


def start_lines(plan: Plan, model: Model, config: TrainConfig, found: UserModel | None = None) -> list[str]:
    """Return lines about trained parameters and first weights, for a run that trains only a part of its model, has
    weights of its model beside it, or starts from files with tensors that its class does not have."""
    trained, total = count_elements(model)
    lines = [f"trained parameters: {trained:,} of {total:,} ({trained / total:.2%})"] if trained < total else []
    unused = found.unused_weights if found is not None else ()
    if unused:
        lines.append(
            f"tensors of the weight files that the model does not have: {len(unused)} ({', '.join(unused[:4])})"
        )
    if config.weights or config.resume:
        return lines
    adapted = read_adapters(plan.model.config) is not None
    if has_weights(plan):
        lines.append(f"first weights: initial values; --weights model starts from those in {plan.model.name}")
    elif adapted:
        lines.append("first weights: initial values; --weights DIR gives the adapters a trained base model")
    return lines


def check_adapter_options(plan: Plan, config: TrainConfig) -> None:
    """Raise RunError if the run is to merge or to start from adapters that the plan does not have, or from adapters
    without the weights that they were trained with."""
    if read_adapters(plan.model.config) is None:
        uses = {"--merge": (config.merge, "to merge"), "--adapter": (bool(config.adapter), "to start from files")}
        for option, (is_set, use) in uses.items():
            if is_set:
                raise RunError(
                    f"The plan has no adapters {use}.",
                    where=option,
                    seen=f"a plan of the complete model {plan.model.name!r}",
                    next_step=f"leave {option} out, or plan with --lora 16",
                )
    elif config.adapter and not config.weights:
        raise RunError(
            "Adapters were trained with the weights of their model, and this run has none.",
            where=f"--adapter {config.adapter}",
            next_step="add --weights model, or --weights DIR with the model of the adapters",
        )


def resolve_weights(plan: Plan, weights: str) -> str:
    """Return the text of `--weights`, with `model` replaced by the plan's model directory. A folder of that name has
    priority. Raises ModelError if the plan's model is no directory with weights."""
    if weights != OWN_WEIGHTS or Path(weights).exists():
        return weights
    if not has_weights(plan):
        raise ModelError(
            "The plan's model is no directory with weights on this host.",
            where="--weights model",
            seen=plan.model.name,
            allowed="a plan made with --model DIR, where DIR holds *.safetensors",
            next_step="name the folder of the weights: --weights DIR",
        )
    return plan.model.name


def has_weights(plan: Plan) -> bool:
    """Return whether the plan's model is a directory of this host with weight files."""
    folder = Path(plan.model.name)
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def weights_value(plan: Plan, model: Model, weights: str, adapter: str = "") -> ParameterValue:
    """Return parameters from a directory of safetensors in Hugging Face names, or from one per module (`vision=DIR`).
    Adapters come from `adapter`, a directory of PEFT, or have their initial values. Raises ModelError if the files do
    not fit the model."""
    from pipefit.model.weights.files import WeightFiles
    from pipefit.model.weights.modules import is_parts_text, module_weights, split_parts

    family, config = plan.model.family, plan.model.config
    if is_parts_text(weights):
        return module_weights(split_parts(weights), family, config, initial_values(plan, model))
    files = WeightFiles(Path(weights), family, config)
    adapters = read_adapters(config)
    if adapters is None:
        return files.read
    if adapter:
        from pipefit.model.weights.peft import open_adapter

        first: ParameterValue = open_adapter(Path(adapter), model, adapters).read
    else:
        first = initial_values(plan, model)
    return lambda name, shape, box: (first if is_adapter(name) else files.read)(name, shape, box)


def save_final(
    worker: Worker, model: Model, run_dir: Path, world: World, found: UserModel | None = None, merge: bool = False
) -> Path:
    """Save the final parameters as safetensors and return their folder; rank 0 writes the pieces of all ranks.

    A run with adapters writes these alone, in the format of PEFT. With `merge` it also writes the complete model with
    the adapters added to its weights. Any other run writes the complete model.
    """
    adapters, factors = read_adapters(worker.plan.model.config), {}
    if adapters is not None:
        from pipefit.model.weights.peft import save_adapter

        factors = dict(gather_parameters(worker, world, adapters=True))
        if world.rank == 0:
            with write_errors("final adapters", run_dir / ADAPTER):
                save_adapter(run_dir / ADAPTER, factors.items(), model, adapters, worker.plan.model.name)
        if not merge:
            return run_dir / ADAPTER
    save_complete(worker, model, run_dir / FULL, world, found, factors)
    return run_dir / FULL


def gather_parameters(worker: Worker, world: World, adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the adapters' parameters, or of all others, on rank 0; nothing on other ranks. All ranks
    run the iterator to its end."""
    from pipefit.run.checkpoint.gather import gather_full

    pieces = [
        piece
        for piece in model_pieces(worker, saving=True)
        if is_adapter(piece.name) == adapters or read_adapters(worker.plan.model.config) is None
    ]
    for name, tensor in gather_full(pieces, group=world.cpu_group):
        if tensor is not None:
            yield name.removeprefix(MODEL), tensor


def save_complete(
    worker: Worker, model: Model, directory: Path, world: World, found: UserModel | None, factors: dict[str, Tensor]
) -> None:
    """Save the parameters of the complete model, with the `factors` of adapters added. Names are Hugging Face's, or
    those of the user's module, together with all untrained tensors of its state dict."""
    from pipefit.model.adapters.peft import adapter_pairs
    from pipefit.model.weights.files import save_weights
    from pipefit.model.weights.peft import merge_factors

    adapters = read_adapters(worker.plan.model.config)
    pairs = adapter_pairs(model) if factors else {}

    def export_parameters() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in gather_parameters(worker, world, adapters=False):
            if name in pairs and adapters is not None:
                tensor = merge_factors(tensor, *(factors[factor] for factor in pairs[name]), adapters.scale)
            for exported_name in exported_names(name, found):
                yield exported_name, tensor
        yield from found.untrained.items() if found is not None else ()

    if world.rank == 0:
        with write_errors("final weights", directory):
            save_weights(directory, export_parameters(), worker.plan.model.family, worker.plan.model.config)
            keep_token_ids(worker.plan.model.name, directory / "config.json")
    else:
        for _ in gather_parameters(worker, world, adapters=False):
            pass


def exported_names(name: str, found: UserModel | None) -> list[str]:
    """Return a parameter's names in the state dict of a user's module; only its own for any other model."""
    return [name, *(alias for alias, known in found.aliases.items() if known == name)] if found is not None else [name]


def keep_token_ids(source: str, config: Path) -> None:
    """Copy `bos_token_id` and similar fields from the model's own config.json, if that is on this host."""
    source_config = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if not (config.is_file() and source_config.is_file() and source_config.suffix == ".json"):
        return
    written, known = (json.loads(path.read_text(encoding="utf-8")) for path in (config, source_config))
    ids = {name: value for name, value in known.items() if name.endswith("_token_id") and name not in written}
    if ids:
        config.write_text(json.dumps({**written, **ids}, indent=2) + "\n", encoding="utf-8")
