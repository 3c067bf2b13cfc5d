"""A user's own model on the command line: whole or in layers, and every mistake as one error with exit code 2."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from tests.support.whole_models import MODELS, load
from torch import nn

from pipefit.cli import main
from pipefit.errors import ModelError
from pipefit.model.capture.whole import UnknownOperatorWarning, capture_whole
from pipefit.model.example import Example

CHOOSY = """
import torch
from torch import nn
from pipefit.model.example import Example

class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        if y.sum() > 0:
            y = y * 2
        return y.sum()

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x).sum()

class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum() / len(x)

def choosy():
    return Example(module=Choosy(), inputs={"x": torch.zeros(2, 4)})

def counting():
    return Example(module=Counting(), inputs={"x": torch.zeros(3, 4)})

def fixed():
    return Example(module=Fixed(4, 4), inputs={"x": torch.zeros(3, 4)})

def without_loss():
    return Example(module=nn.Linear(4, 4), inputs={"input": torch.zeros(2, 4)})

def one_row():
    return Example(module=nn.Linear(4, 4), inputs={"input": torch.zeros(1, 4)})

def module():
    return nn.Linear(4, 4)

def nothing():
    return []

def failing():
    raise OSError("no weights here")
"""


def run(capfd, monkeypatch, *words: str) -> tuple[int, str, str]:
    """(exit code, what was printed, errors) of a command."""
    monkeypatch.setattr(sys, "argv", ["pipefit", *words])
    code: int | str | None = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    out, errors = capfd.readouterr()
    return int(code or 0), out, errors


def refused(capfd, monkeypatch, source: str) -> str:
    """The message of a search that is refused: the only thing printed."""
    words = ("shard", "--model", source, "--cluster", "2xH100", "--batch", "4", "--seq", "8")
    code, out, errors = run(capfd, monkeypatch, *words)
    assert code == 2 and errors.startswith("pipefit: ") and not out, (code, out, errors)
    assert "Traceback" not in errors and "torch.ops" not in errors and len(errors.splitlines()) <= 6, errors
    return errors


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (
            "choosy",
            ["The model cannot be captured.", "choosy", "data-dependent", "model.py:13", "rewrite that line"],
        ),
        ("counting", ["cannot be captured", "it changes the buffer norm.", "try: give the model as a list of layers"]),
        ("fixed", ["cannot be captured", "one number of rows only", "len(x)", "model.py:26"]),
        ("without_loss", ["The model returns no loss.", "Linear.forward", "a tensor", "Example(loss=...)"]),
        ("one_row", ["the same number of rows in dimension 0", "input (1, 4)", "at least two"]),
        ("module", ["returns no model", "Linear", "a list of nn.Module layers", "give an Example"]),
        ("nothing", ["returns no model", "an empty list"]),
        ("failing", ["The function of the model failed.", "model.py, line 51", "OSError: no weights here"]),
        ("absent", ["The file has no such function.", "absent", "choosy"]),
    ],
)
def test_a_models_mistake_is_one_error(capfd, monkeypatch, tmp_path, function, parts):
    file = tmp_path / "model.py"
    file.write_text(CHOOSY)
    text = refused(capfd, monkeypatch, f"{file}:{function}")
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            "import torch\nimport no_such_library\n",
            ["cannot be imported", "line 2", "No module named 'no_such_library'"],
        ),
        ("def make(:\n    pass\n", ["cannot be imported", "line 1", "SyntaxError: invalid syntax"]),
        ("x = 1\ny = x / 0\n", ["cannot be imported", "line 2", "ZeroDivisionError: division by zero", "python -i"]),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_error(capfd, monkeypatch, tmp_path, content, parts):
    file = tmp_path / "model.py"
    file.write_text(content)
    text = refused(capfd, monkeypatch, f"{file}:make")
    for part in (*parts, str(file)):
        assert part in text, text


class Unusual(nn.Module):
    """A function that nothing here knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(self.up(x), 1, 1).square().sum()


def test_an_unknown_function_is_named_with_its_line_and_computed_whole():
    with pytest.warns(UnknownOperatorWarning) as told:
        model = capture_whole(Example(module=Unusual(), inputs={"x": torch.zeros(2, 6)}))
    line = Unusual.forward.__code__.co_firstlineno + 1
    (message,) = [str(one.message) for one in told]
    assert "aten.roll.default" in message and f"test_user.py:{line}" in message and "in full" in message
    (operator,) = [one for one in model.layer_graph(model.layers[0]).operators if one.kind == "aten"
                   and "roll" in one.attributes["target"]]  # fmt: skip
    from pipefit.shard.rules import labels_of

    assert labels_of(operator, (("B", 6),), (("B", 6),)).outputs == ((None, None),)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.randn_like(x)).sum()


class TwoMeans(nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x, labels) + 0.01 * x.square().mean(1).mean()


def test_what_would_be_wrong_is_refused():
    with pytest.raises(ModelError, match=r"aten.randn_like draws random numbers.*test_user.py:\d+"):
        capture_whole(Example(module=Noisy(), inputs={"x": torch.zeros(2, 6)}))
    inputs = {"x": torch.zeros(2, 6), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ModelError, match=r"The loss combines means(.|\n)*remove the other terms"):
        capture_whole(Example(module=TwoMeans(), inputs=inputs))


def test_a_whole_model_is_searched_on_the_command_line(capfd, monkeypatch, tmp_path):
    file = tmp_path / "small.py"
    text = (MODELS / "vit.py").read_text().replace("ViT(10, 32, 4, 768, 12, 12), 32", "ViT(8, 8, 4, 24, 4, 2), 8")
    file.write_text(text)
    words = ("shard", "--model", f"{file}:vit_b", "--cluster", "2xH100", "--batch", "64", "--seq", "1")
    code, out, errors = run(capfd, monkeypatch, *words)
    assert code == 0, errors
    assert "conv" in out and "cross_entropy" in out


def test_examples_are_the_published_models():
    """Parameters as published: VGG19 with 10 classes, ViT-B's blocks, BERT-Base."""
    from pipefit.model.registry import parameter_count

    meta = torch.device("meta")
    with meta, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vgg = load("vgg").vgg19()
    assert sum(p.numel() for p in vgg.module.parameters()) == 139_611_210
    assert parameter_count(capture_whole(vgg)) == 139_611_210


def test_a_whole_model_has_one_length_and_no_slices():
    from pipefit.errors import PlanError
    from pipefit.plan.request.sequence_length import check_length, resolve_length
    from pipefit.plan.request.sliceable import check_sliceable

    moe = load("bert_moe")
    model = capture_whole(moe.example(moe.BertMoe(20, 6, 8, 2, 1, experts=2), 6))
    check_length(model.modules[0], model, 6, "--seq")
    with pytest.raises(PlanError, match=r"as one graph, for one sequence length(.|\n)*7 tokens(.|\n)*6, as in"):
        check_length(model.modules[0], model, 7, "--seq")
    assert resolve_length(model, None) == resolve_length(model, 6) == 6
    with pytest.raises(PlanError, match="captured as one graph cannot be cut into slices"):
        check_sliceable(model)
    stripes = capture_whole(load("own_module").stripes())
    assert resolve_length(stripes, None) == 1
    with pytest.raises(PlanError, match=r"one sequence length(.|\n)*5 tokens(.|\n)*leave --seq out"):
        resolve_length(stripes, 5)
