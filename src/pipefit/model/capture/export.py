"""Export helpers for layers and complete models: meta copies, quiet export, one-line reasons, constant folding.

Torch is imported inside the functions.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pipefit.model.capture.convert import GraphEmitter
from pipefit.model.capture.operator_modules import replace_operator_modules
from pipefit.model.capture.row_constants import draws_numbers, fold_rows
from pipefit.model.quiet import quiet_logs

if TYPE_CHECKING:
    import torch
    from torch import nn

MODULE = "language"
"The name of the only module of a captured chain."


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress torch's warnings, logs and printed graphs; the reason of a failure contains their content."""
    with quiet_logs(), warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def traced_numbers() -> Iterator[None]:
    """Make `torch.tensor` of numbers a traced call: on the meta device a tensor constant would lose its numbers.
    Distributions do not check theirs. The rounding of a type (`torch.finfo(...).eps`) has the value of float32 in
    every run."""
    import torch
    from torch.distributions import Distribution

    create, checks, facts = torch.tensor, Distribution._validate_args, torch.finfo

    def finfo_of_runs(dtype: Any = None) -> Any:
        known = facts(dtype) if dtype is not None else facts()
        names = ("bits", "dtype", "max", "min", "resolution", "smallest_normal", "tiny")
        return SimpleNamespace(**{name: getattr(known, name) for name in names}, eps=facts(torch.float32).eps)

    def create_traced(data: Any, **options: Any) -> Any:
        if options.get("requires_grad"):
            return create(data, **options)
        used = {name: value for name, value in options.items() if name in ("dtype", "device")}
        if isinstance(data, (bool, int, float)):
            return torch.full((), data, **used)
        if isinstance(data, (list, tuple)) and data and all(isinstance(item, (bool, int, float)) for item in data):
            kind = used.pop("dtype", None) or create(data).dtype
            return torch.stack([torch.full((), item, dtype=kind, **used) for item in data])
        return create(data, **options)

    torch.tensor, Distribution._validate_args, torch.finfo = create_traced, False, finfo_of_runs
    try:
        yield
    finally:
        torch.tensor, Distribution._validate_args, torch.finfo = create, checks, facts


@contextmanager
def uncached_shapes() -> Iterator[None]:
    """Export without torch's cache of fake tensors, which costs more than it saves if rows and tokens are symbols."""
    import torch._dynamo.config as settings

    with settings.patch(fake_tensor_cache_enabled=False):
        yield


def export_reason(error: Exception, layer: nn.Module) -> str:
    """The error message in one line, with the last line of user code in its traceback."""
    import traceback

    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    lines = [line for line in lines if "TORCH_LOGS" not in line] or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "/torch/" not in f.filename and "/pipefit/model/" not in f.filename]
    outside = [f for f in outside if f.filename not in ("<string>", "<frozen importlib._bootstrap>")]
    if "specialized it to be a constant" in lines[0] or re.search(r"guard (\d+) <= .* <= \1\b", lines[0]):
        lines[0] = "it works for one number of rows only: somewhere rows become a plain number, as len(x) makes them"
    user = re.search(r'File "([^"]+)", line (\d+)', str(error))
    if outside:
        file, line = outside[-1].filename, str(outside[-1].lineno)
    elif user is not None:
        file, line = user[1], user[2]
    else:
        code = type(layer).forward.__code__
        file, line = code.co_filename, str(code.co_firstlineno)
    return f"{lines[0][:200]}, at {file.rsplit('/', 1)[-1]}:{line}"


def on_meta(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the layer without storage: parameters in `dtype` on the meta device, operator modules as one operator
    each. Raises ModelError for an operator module that contradicts its kind."""
    import copy

    import torch

    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=kind, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in layer.buffers():
        kind = dtype if buffer.is_floating_point() and dtype != torch.bfloat16 else buffer.dtype
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=kind, device="meta")
    module = copy.deepcopy(layer, memo)
    replace_operator_modules(module)
    return module


def fold_constant(emitter: GraphEmitter, node: Any) -> bool:
    """Compute a node whose inputs are all known numbers (frequencies of rotary embeddings, scales). Returns whether it
    did."""
    import torch

    if emitter.whole:
        return fold_rows(emitter, node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return False
    if any(source not in emitter.constants for source in node.all_input_nodes) or value.numel() > emitter.largest:
        return False
    if draws_numbers(node):
        return False

    def known_value(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return emitter.constants[item].clone()
        return torch.device("cpu") if isinstance(item, torch.device) else item

    arguments = torch.fx.node.map_aggregate(node.args, known_value)
    keywords = torch.fx.node.map_aggregate(dict(node.kwargs), known_value)
    emitter.constants[node] = node.target(*arguments, **keywords)
    return True
