"""Weight files with one tensor per expert, read for a user's own module that stacks experts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.tiny_configs import tiny_config
from pipefit.model.any_class import build_class
from pipefit.model.families.build import USER
from pipefit.model.weights.files import WeightFiles


@pytest.mark.parametrize("kind", ["dots1", "olmoe", "qwen3_next"])
def test_one_tensor_per_expert_is_one_parameter(kind, tmp_path):
    torch.manual_seed(0)
    theirs = build_class(tiny_config(kind, dropout=False))
    theirs.save_pretrained(tmp_path)
    with WeightFiles(tmp_path, USER, {}) as files:
        assert any(".experts.0." in name for name in files.names)
        for name, parameter in theirs.named_parameters():
            assert torch.equal(files.read(name, parameter.shape), parameter), name
            if parameter.dim() == 3:
                box = [(1, 3), (4, parameter.shape[1] - 5), (2, 7)]
                part = parameter[tuple(slice(*edge) for edge in box)]
                assert torch.equal(files.read(name, parameter.shape, box), part), name
