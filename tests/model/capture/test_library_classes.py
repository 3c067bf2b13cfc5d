"""Classes of `transformers` from their config.json: one device gives the loss and gradients of the class."""

from __future__ import annotations

import json
import math
import sys
import warnings

import pytest
import torch
from tests.support.whole_runs import compare, feed_of, reference, run_whole

from benchmarks.models.coverage import class_difference, plan_stages, tiny_example
from benchmarks.models.tiny_configs import tiny_config
from pipefit.errors import ModelError
from pipefit.model.analysis.saved import operator_call
from pipefit.model.any_class import FIELDS, TOKENS, build_class, empty_parameters, library_example
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example
from pipefit.model.ops import KINDS
from pipefit.model.ops.kind import Flops
from pipefit.model.registry import USER, open_model, resolve_model

EXACT = 1e-9
TYPES = ("stablelm", "olmo3", "afmoe", "mamba2", "mpt", "xglm", "gemma3", "llama4_text", "recurrent_gemma", "gpt_neo",
         "longcat_flash", "dbrx", "cpmant")  # fmt: skip
"""Partial rotary positions; windows; experts; a state-space model; ALiBi; learned dropout of flattened rows; numbers
placed by a mask; complex rotary positions; copies in place; a number made on the device; experts with loops of their
own; indices that are computed."""


@pytest.mark.parametrize("kind", TYPES)
def test_a_captured_class_is_the_class(kind):
    example = tiny_example(kind, dropout=False)
    model = capture_whole(example, kind)
    plan_stages(model)
    assert len(model.layers) > 1
    assert class_difference(example, model) <= EXACT


def operators_of(model, kind):
    return [op for layer in model.layers for op in model.layer_graph(layer).operators if op.kind == kind]


def attentions(model):
    return operators_of(model, "attention")


LOOPS = {"llama4_text": {"num_experts_per_tok": 1, "num_local_experts": 6}, "dbrx": {}}
"""Types whose experts are no class of the library's interface -> fields of their configuration."""


def loop_example(kind, **fields):
    torch.manual_seed(0)
    return library_example({"source": kind, FIELDS: {**tiny_config(kind, False), **LOOPS[kind], **fields}, TOKENS: 12})


@pytest.mark.parametrize("kind", LOOPS)
def test_selected_experts_of_a_class_are_computed_alone(kind):
    example = loop_example(kind)
    model = capture_whole(example, kind)
    assert class_difference(example, model) <= EXACT
    experts, sizes = operators_of(model, "experts"), {"B": 2, "T": 12}
    assert len(experts) == 2 and not operators_of(model, "einsum")
    for layer in model.layers[1:3]:
        graph = model.layer_graph(layer)
        (operator,) = [op for op in graph.operators if op.kind == "experts"]
        chosen = graph.find_tensor(operator.inputs[1]).shape
        specs = {spec.name: spec.shape for spec in graph.parameters}
        numbers = sum(math.prod(specs[name]) for name in operator.inputs[3:])
        top, count = chosen[1], operator.attributes["experts"]
        assert top == (1 if kind == "llama4_text" else 2)
        flops = KINDS["experts"].flops(operator_call(graph, operator, sizes, 8))
        assert flops == Flops(*[2 * 24 * top * numbers // count] * 3)


@pytest.mark.parametrize("kind", LOOPS)
def test_experts_with_another_activation_are_all_computed(kind):
    fields = tiny_config(kind, False)
    other = {"ffn_config": {**fields["ffn_config"], "ffn_act_fn": {"name": "relu2"}}} if kind == "dbrx" else {}
    example = loop_example(kind, **(other or {"hidden_act": "relu2"}))
    model = capture_whole(example, kind)
    assert not operators_of(model, "experts") and operators_of(model, "einsum")
    assert class_difference(example, model) <= EXACT


def test_masks_for_every_row_become_attributes():
    model = capture_whole(tiny_example("olmo3"), "olmo3")
    assert [operator.attributes["window"] for operator in attentions(model)] == [6, None]
    assert all(operator.attributes["causal"] for operator in attentions(model))


def write_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps({**tiny_config("stablelm"), **fields}))
    return str(folder)


def test_a_directory_of_an_unknown_type_is_the_class(tmp_path):
    model = open_model(write_config(tmp_path), 12)
    assert model.family == USER
    assert model.config["vocab_size"] == 256
    assert [layer.name for layer in model.layers][1:3] == ["model.layers.0", "model.layers.1"]
    inputs = {tensor.role: tensor.shape for layer in model.layers for tensor in model.layer_graph(layer).inputs}
    assert (inputs["tokens"], inputs["labels"]) == (("B", 12), ("B", 12))


def test_a_value_that_the_family_does_not_compute_is_captured_from_the_class(tmp_path):
    """Long rotary scaling of Phi-3."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    fields = {**tiny_config("phi3"), "rope_parameters": factors, "original_max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match="rotary scaling is unknown.*longrope.*class of `transformers`"):
        model = open_model(str(tmp_path), 12)
    assert model.family == USER
    assert [layer.name for layer in model.layers][1:3] == ["model.layers.0", "model.layers.1"]
    fields["num_attention_heads"] = 0
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="a positive integer"):
        open_model(str(tmp_path), 12)


@pytest.mark.parametrize("original", [8, 32])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_of_the_length_are_those_of_the_class(kind, original):
    scaling = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": original}
    scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {"factor": 2.0}
    fields = {**tiny_config("phi3" if kind == "longrope" else "llama", False), "rope_parameters": scaling}
    fields |= {"original_max_position_embeddings": original, "max_position_embeddings": original}
    torch.manual_seed(0)
    theirs = build_class(fields)
    example = library_example({"source": kind, FIELDS: fields, TOKENS: 12})
    example.module.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 256, (2, 12))
    assert torch.equal(example.module(ids).logits, theirs(ids).logits)
    assert class_difference(example, capture_whole(example, kind)) <= EXACT


def test_zeros_of_a_class_without_values_need_no_memory():
    """Llama 4 makes its experts by `torch.zeros`: 40 GB a layer, and small zeros keep memory of their own."""
    with empty_parameters():
        large, small = torch.zeros(10, 1 << 30, dtype=torch.float64), torch.zeros(3, 4)
        like = torch.zeros((1 << 13, 1 << 13), dtype=torch.bool)
    assert large.shape == (10, 1 << 30) and large.dtype == torch.float64 and large.untyped_storage().nbytes() == 8
    assert like.shape == (1 << 13, 1 << 13) and not like[5, 7] and like.untyped_storage().nbytes() == 1
    small[0] = 1.0
    assert small.sum() == 4 and torch.zeros(1 << 24).untyped_storage().nbytes() == 1 << 26


def test_a_class_is_captured_without_memory_for_its_parameters(tmp_path):
    model = open_model(write_config(tmp_path), 12)
    assert model.graphs == capture_whole(tiny_example("stablelm"), "").graphs


@pytest.mark.parametrize("decoder", [False, True])
def test_attention_that_sees_later_tokens_is_warned_of(decoder, tmp_path):
    fields = {**tiny_config("bert"), "is_decoder": decoder}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        open_model(str(tmp_path), 12)
    assert any("attention sees later tokens" in str(warning.message) for warning in seen) == (not decoder)


def test_without_a_length_the_error_says_how_to_give_one(tmp_path):
    with pytest.raises(ModelError) as caught:
        open_model(write_config(tmp_path))
    assert "one sequence length" in caught.value.full_text()
    assert "--seq 1024" in caught.value.full_text()


def test_a_configuration_that_the_class_refuses(tmp_path):
    with pytest.raises(ModelError) as caught:
        open_model(write_config(tmp_path, num_attention_heads="many"), 12)
    assert "cannot be built from this configuration" in caught.value.full_text()
    assert "'num_attention_heads' expected int, got str (value: 'many')" in caught.value.full_text()


def test_without_transformers_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    with pytest.raises(ModelError) as caught:
        resolve_model(write_config(tmp_path), 12)
    assert "pip install 'pipefit[transformers]'" in caught.value.full_text()


def test_a_type_that_nobody_knows(tmp_path):
    with pytest.raises(ModelError) as caught:
        resolve_model(write_config(tmp_path, model_type="nobody"), 12)
    assert "every causal language model of `transformers`" in caught.value.full_text()


class CountedRows(torch.nn.Module):
    """A class that uses the number of a row."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, input):
        return self.head(input) * torch.arange(input.shape[0], device=input.device)[:, None]


def test_numbers_that_count_rows_are_refused_with_their_line():
    inputs = {"input": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    example = Example(module=CountedRows(), inputs=inputs, loss=torch.nn.functional.cross_entropy)
    with pytest.raises(ModelError) as caught:
        capture_whole(example)
    assert "numbers that count the rows of a batch, at test_library_classes.py" in caught.value.full_text()


class CountedTokens(torch.nn.Module):
    """A class whose number of tokens depends on values."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, input):
        places = input[:, 0].nonzero()[:, 0]
        return self.head(input[places]).sum() + self.head(input)


def test_sizes_that_depend_on_values_are_refused_with_their_line():
    inputs = {"input": torch.ones(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    example = Example(module=CountedTokens(), inputs=inputs, loss=torch.nn.functional.cross_entropy)
    with pytest.raises(ModelError) as caught:
        capture_whole(example)
    text = caught.value.full_text()
    assert "a size that is not a product of rows, tokens and numbers (u0), at test_library_classes.py:" in text


LONG = 2100
"""Tokens whose square is more than a graph holds as numbers."""


@pytest.mark.parametrize("kind", ["stablelm", "olmo3"])
def test_masks_of_long_sequences_become_attributes(kind):
    fields = {**tiny_config(kind), "max_position_embeddings": LONG}
    model = capture_whole(library_example({"source": kind, FIELDS: fields, TOKENS: LONG}), kind)
    windows = [operator.attributes["window"] for operator in attentions(model)]
    assert windows == ([6, None] if kind == "olmo3" else [None, None])


class HolesInMask(torch.nn.Module):
    """Attention whose mask has no name: every seventh key is hidden, but for its own query."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.linear(x).unsqueeze(1).chunk(3, dim=-1)
        place = torch.arange(x.shape[1], device=x.device)
        mask = (place[:, None] >= place) & ((place % 7 != 3) | (place[:, None] == place))
        mask = mask.expand(x.shape[0], 1, -1, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()


def test_a_long_mask_of_another_form_is_computed_by_the_graph():
    example = Example(module=HolesInMask(), inputs={"x": torch.randn(2, LONG, 4)})
    model = capture_whole(example)
    kinds = [operator.kind for layer in model.layers for operator in model.layer_graph(layer).operators]
    assert "attention" not in kinds and "softmax" in kinds
    sizes = [
        len(op.attributes["values"]) for op in model.layer_graph(model.layers[0]).operators if op.kind == "constant"
    ]
    assert max(sizes) <= LONG
    inputs = {"x": torch.randn(2, LONG, 4, dtype=torch.float64)}
    loss, gradients = reference(example, inputs)
    state = {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    compare(run_whole(None, 0, model, (), (), state, feed_of(model, inputs), 1), (loss, gradients))


class DrawnMask(torch.nn.Module):
    """A mask drawn from known probabilities."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * torch.bernoulli(torch.full((4,), 0.5, device=x.device))).square().sum()


def test_drawn_numbers_are_no_constants():
    with pytest.raises(ModelError, match="bernoulli draws random numbers"):
        capture_whole(Example(module=DrawnMask(), inputs={"x": torch.randn(2, 4)}))
