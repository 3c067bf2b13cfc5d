"""In-place arithmetic of a user's module: replaced before conversion where nothing shares the changed memory."""

from __future__ import annotations

import pytest
import torch
from tests.support.whole_runs import compare, feed_of, reference, run_whole

from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example


class OwnTensor(torch.nn.Module):
    """Weights of a router, divided by their sum in place, then used under both names."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = torch.nn.Linear(4, 6), torch.nn.Linear(3, 4)

    def forward(self, input):
        weights, _ = torch.topk(self.gate(input).softmax(-1), 3, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        divided = weights
        divided *= 1.5
        return self.head(weights + divided)


class SharedMemory(OwnTensor):
    """A view made before the change shows it."""

    def forward(self, input):
        hidden = self.gate(input) + 1.0
        front = hidden[:, :3]
        hidden *= 2.0
        return self.head(front + hidden[:, 3:])


class TurnedView(OwnTensor):
    """The changed tensor is a view of one that is used afterwards."""

    def forward(self, input):
        hidden = self.gate(input) + 1.0
        front = hidden[:, :3]
        front.add_(hidden[:, 3:])
        return self.head(hidden[:, :3])


class MixedTypes(OwnTensor):
    """The changed tensor keeps its type, although the number has a wider one."""

    def forward(self, input):
        hidden = self.gate(input).exp()[:, :3] * 1.0
        hidden += torch.ones(3, dtype=torch.float64, device=input.device)
        return self.head(hidden.to(self.head.weight.dtype))


@pytest.mark.parametrize(
    ("module", "traced_again"), [(OwnTensor, 0), (SharedMemory, 1), (TurnedView, 1), (MixedTypes, 1)]
)
def test_changed_tensors_give_the_modules_loss_and_gradients(module, traced_again, monkeypatch):
    calls = []
    original = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *words: calls.append(1) or original(*words)
    )
    torch.manual_seed(0)
    inputs = {"input": torch.randn(3, 4, dtype=torch.float64), "labels": torch.tensor([0, 1, 3])}
    example = Example(
        module=module(), inputs={**inputs, "input": inputs["input"].float()}, loss=torch.nn.functional.cross_entropy
    )
    model = capture_whole(example)
    assert len(calls) == traced_again
    wanted = reference(example, inputs)
    state = {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    compare(run_whole(None, 0, model, (), (), state, feed_of(model, inputs), 3), wanted)
