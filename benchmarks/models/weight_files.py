"""Weight files of a class of `transformers`: those of `save_pretrained` read by pipefit, and pipefit's read by
`from_pretrained`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EQUAL = "exact"
"""The result for files that are read and written with equal values to the last bit."""


def compare_files(fields: Mapping[str, Any]) -> str:
    """Return `exact` if the files of the class of a config.json are read and written exactly, or else the reason."""
    from pipefit.errors import PipefitError

    module = random_class(fields)
    with tempfile.TemporaryDirectory() as folder:
        try:
            difference = read_difference(module, fields, Path(folder) / "theirs")
            return difference or written_difference(module, fields, Path(folder) / "ours") or EQUAL
        except PipefitError as error:
            return f"refused: {str(error).splitlines()[0]}"
        except Exception as error:  # save_pretrained and from_pretrained may raise anything
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def random_class(fields: Mapping[str, Any]) -> Any:
    """Return the class of a config.json with random parameters, in float32."""
    import torch

    from pipefit.model.any_class import build_class

    torch.manual_seed(0)
    module = build_class(fields)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def read_difference(module: Any, fields: Mapping[str, Any], folder: Path) -> str:
    """Return the tensors of the class that pipefit reads with other values from the class's files; "" if there are
    none."""
    import torch

    from pipefit.model.any_class import FIELDS
    from pipefit.model.families.build import USER
    from pipefit.model.weights.files import WeightFiles

    module.save_pretrained(folder)
    with WeightFiles(folder, USER, {FIELDS: fields}) as files:
        names = [
            name
            for name, tensor in exported_tensors(module).items()
            if not torch.equal(files.read(name, tensor.shape), tensor)
        ]
    return f"read with other values: {', '.join(names[:4])}" if names else ""


def written_difference(module: Any, fields: Mapping[str, Any], folder: Path) -> str:
    """Return the tensors that `from_pretrained` reads with other values from pipefit's files; "" if there are none."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipefit.model.any_class import FIELDS
    from pipefit.model.families.build import USER
    from pipefit.model.quiet import quiet_logs
    from pipefit.model.weights.files import save_weights

    save_weights(folder, exported_tensors(module), USER, {FIELDS: fields})
    with quiet_logs():
        again, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    state, wanted = again.state_dict(), module.state_dict()
    names = [name for name in wanted if name not in state or not torch.equal(state[name], wanted[name])]
    reports = [f"{title}: {', '.join(map(str, sorted(items)[:4]))}" for title, items in info.items() if items]
    return "; ".join([*([f"written with other values: {', '.join(names[:4])}"] if names else []), *reports])


def exported_tensors(module: Any) -> dict[str, Any]:
    """Return the tensors that a run exports, by name: parameters, then their further names and the buffers."""
    return {**{name: parameter.detach() for name, parameter in module.named_parameters()}, **module.state_dict()}
