"""Models of `transformers` with adapters of PEFT, and the same in our graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.support import worker_cases as cases
from tests.support.in_float64 import AllInFloat64
from tests.support.library_parity import library_model

from pipefit.cluster import local_cluster
from pipefit.model.adapters.options import AdapterConfig, tuned_config
from pipefit.model.adapters.peft import PREFIX
from pipefit.model.adapters.targets import is_adapter
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config, open_family
from pipefit.model.weights.files import WeightFiles
from pipefit.model.weights.peft import AdapterNames
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.state import gradient_pieces

JOB = Job(batch=4, sequence=12, precision="float64", seed=5)


def adapted_model(config: Mapping[str, Any], adapters: AdapterConfig, freeze: tuple[str, ...] = ()) -> Model:
    """Our model of a config.json with adapters."""
    described = describe_config(config, "m", "m")
    return open_family(described.family, tuned_config(described.config, adapters, freeze))


def plan_of(model: Model, job: Job = JOB, **decisions: Any) -> Plan:
    return build_plan(model, local_cluster(8), job, ParallelConfig(**decisions), name="m")


def peft_model(config: dict[str, Any], adapters: AdapterConfig, folder: Path) -> Any:
    """The model of `transformers` with adapters of PEFT, all their factors random; its weights are in `folder`."""
    from peft import LoraConfig, get_peft_model

    base = library_model(config)
    base.save_pretrained(folder)
    target = adapters.targets[0] if len(adapters.targets) == 1 else list(adapters.targets)
    options = LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, lora_dropout=adapters.dropout, target_modules=target,
        task_type="CAUSAL_LM", use_rslora=adapters.rslora,
    )  # fmt: skip
    with AllInFloat64():
        model = get_peft_model(base, options, autocast_adapter_dtype=False)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.2
    return model


def peft_tensors(model: Any, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The adapters of a PEFT model, or their gradients, under the names of its files."""
    return {
        name.replace(".default.", "."): (parameter.grad if gradients else parameter.detach()).contiguous()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def adapter_files(tensors: dict[str, torch.Tensor], model: Model, path: Path) -> WeightFiles:
    """Reads tensors of PEFT under our names."""
    assert all(name.startswith(PREFIX) for name in tensors)
    save_file(tensors, path)
    return WeightFiles(path, model.family, model.config, AdapterNames(model))


def one_step(plan: Plan, model: Model, base: Path, adapters: WeightFiles, vocabulary: int) -> tuple[float, Any]:
    """(loss, gradients by global name) of our runtime in one process, from PEFT's values."""
    files = WeightFiles(base, model.family, model.config)

    def value(name: str, shape: Any, box: Any) -> torch.Tensor:
        return (adapters if is_adapter(name) else files).read(name, shape, box)

    worker = build_worker(plan, model, cases.CommGroups(), torch.device("cpu"), cases.OPTIMIZER, value=value)
    rows, step = cases.ArrayRows(plan.job.sequence, vocabulary), cases.step_rows(plan, 0)
    feeds = make_inputs(plan, worker.device, rows, step, torch.device("cpu"))
    loss = worker.run_step(feeds, 0, step.divisor).read_values()[0]
    gradients = {}
    for piece in gradient_pieces(worker):
        assert piece.flat is not None
        flat = gradients.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.float64))
        flat.view(-1)[slice(*piece.flat)] = piece.tensor
    return loss, gradients


def peft_step(model: Any, plan: Plan, vocabulary: int) -> float:
    """The same step by PEFT; leaves gradients."""
    tokens, labels, divisor = cases.rows_of(plan, 0, vocabulary)
    with AllInFloat64():
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / divisor).backward()
    return float(loss) / divisor


def held_bytes(plan: Plan, model: Model) -> dict[str, int]:
    """Bytes of the tensors that a rank keeps between steps."""
    worker = cases.build(plan, model)
    buckets = (*worker.buckets, *worker.frozen_buckets)
    values = [bucket.owned_parameters if bucket.shards_parameters else bucket.parameters for bucket in buckets]
    values += [tensor for _, _, tensor, _ in worker.frozen.values()]
    states = [tensor for optimizer in worker.optimizers for tensor in optimizer.moments.values()]
    states += [optimizer.master for optimizer in worker.optimizers if optimizer.has_master]
    tensors = {"parameters": values, "gradients": [bucket.gradients for bucket in buckets], "optimizer": states}
    return {part: sum(tensor.numel() * tensor.itemsize for tensor in of_part) for part, of_part in tensors.items()}
