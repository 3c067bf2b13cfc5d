"""A model family of another package, from the how-to page: planned, drawn and trained as one process trains it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support import train_toys as toys
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.plugin_commands import read_losses, run_with_package
from tests.support.plugin_package import installed, page_examples, write_package

from pipefit.errors import ModelError, PipefitError, PluginError
from pipefit.model.families import FAMILIES, InitialValue, ModelFamily, register_model_family
from pipefit.model.families.build import build_layers, typed_config
from pipefit.model.families.finish import finish_layers
from pipefit.model.registry import describe_config, open_model
from pipefit.optimizers import find_optimizer
from pipefit.plan.check.rules import load_plan
from pipefit.plugins import load_plugins
from pipefit.run.stage.initial_values import family_initials, initial_values, parameter_deviation, parameter_kinds

__all__ = ["installed"]

CONFIG = {"model_type": "toy_mlp", "vocab_size": 256, "width": 16, "layers": 4}


@pytest.fixture
def toy_site(tmp_path: Path) -> Path:
    """The page's package, installed in a folder of its own, and `my-model/config.json` beside that folder."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    files = {"toy_mlp/__init__.py": "", **page_examples("add-a-model-family.md")}
    return write_package(tmp_path / "site", files, "toy_mlp.config")


def load_in_process(folder: str) -> tuple[str, ...]:
    """Load the plug-ins of a folder in a process of the pool."""
    sys.path.insert(0, folder)
    load_plugins.cache_clear()
    return load_plugins()


@pytest.mark.gloo
@pytest.mark.parametrize("decisions", [{"stages": 3}, {"stages": 2, "replicas": (1, 1), "sharded_state": "optimizer"}])
def test_gradients_are_those_of_one_process(toy_site, installed, gloo_pool, monkeypatch, decisions) -> None:
    installed(toy_site, FAMILIES)
    load_plugins()
    monkeypatch.setitem(plans.CONFIGS, "toy", CONFIG)
    plan = plans.plan("toy", microbatches=2, **decisions)
    assert plan.model.family == "toy-mlp" and plan.model.config == CONFIG
    loss, gradients = plans.reference("toy", plans.JOB)
    model, ranks = plans.model("toy"), len(plan.used_devices)
    loaded = gloo_pool.run(load_in_process, str(toy_site), ranks=gloo_pool.size)
    assert loaded[0] == ("toy: toy_mlp.config",)
    gloo_pool.run(cases.prepare, [(plan, model)], ranks=gloo_pool.size)
    result = gloo_pool.run(cases.run_steps, plan, model, plans.VOCABULARY, ranks=ranks)[0]
    assert result["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert set(result["gradients"]) == set(gradients) and len(gradients) == 18
    for name, gradient in gradients.items():
        wanted = gradient.numpy()
        assert np.abs(result["gradients"][name] - wanted).max() <= 1e-10 * np.abs(wanted).max(), name


@pytest.mark.gloo
def test_commands_plan_train_and_draw_it(toy_site: Path) -> None:
    """By the entry point alone, in processes that know of the package only what is installed."""
    folder = toy_site.parent
    text = toys.write_text(folder)
    run = partial(run_with_package, toy_site, folder)
    run("plan", "--model", "my-model", "--local", "2", "--batch", "8", "--seq", "16", "--precision", "float64",
        "--fix", "stages=2", "--fix", "microbatches=2", "-o", "plan.json")  # fmt: skip
    plan = load_plan(folder / "plan.json")
    assert plan.model.family == "toy-mlp" and len(plan.stages) == 2
    run("verify", "plan.json", "--rank", "1")
    run("train", "plan.json", "--data", str(text), "--steps", "2", "--held-out", "8", "--device", "cpu",
        "--local", "2", "-o", "run")  # fmt: skip
    losses = read_losses(folder / "run")
    assert len(losses) == 2 and all(4 < loss < 8 for loss in losses), "near log 256 in the beginning"
    run("report", "run", "-o", "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "my-model (toy-mlp)" in page and 'id="timeline"' in page


def test_a_wrong_field_of_its_config_is_named(toy_site: Path, installed, pipefit) -> None:
    installed(toy_site, FAMILIES)
    path = toy_site.parent / "my-model" / "config.json"
    path.write_text(json.dumps(CONFIG | {"width": 0}), encoding="utf-8")
    words = ("--cluster", "2xH100", "--batch", "8", "--seq", "16")
    code, _, err = pipefit("plan", "--model", str(path.parent), *words)
    assert code == 2 and "The field 'width' of the configuration has a wrong value." in err and str(path) in err
    path.write_text(json.dumps(CONFIG | {"model_type": "toy_other"}), encoding="utf-8")
    code, _, err = pipefit("plan", "--model", str(path.parent), *words)
    assert code == 2 and "The model type is not known." in err and "toy_mlp" in err


@pytest.mark.parametrize(
    ("switch", "advice"), [("on", "install the plug-in that adds it"), ("off", "leave out PIPEFIT_PLUGINS=off")]
)
def test_a_file_that_needs_a_plugin_says_so(monkeypatch, switch: str, advice: str) -> None:
    """A family, a model type and an optimizer that no loaded package has."""
    monkeypatch.setenv("PIPEFIT_PLUGINS", switch)
    for call in (
        lambda: typed_config("toy-mlp", CONFIG),
        lambda: describe_config(CONFIG, "my-model", "config.json"),
        lambda: find_optimizer("adamax"),
    ):
        with pytest.raises(PipefitError) as error:
            call()
        assert advice in str(error.value) and "did you mean" not in str(error.value)
    with pytest.raises(PipefitError, match="did you mean 'adamw'"):
        find_optimizer("adamx", "--optimizer")


def test_a_model_type_or_name_of_another_family_is_refused(installed, tmp_path: Path) -> None:
    installed(tmp_path, FAMILIES)
    read, builder = FAMILIES["gpt2"].read, FAMILIES["gpt2"].builder
    with pytest.raises(ModelError, match="Two model families read one model type") as error:
        register_model_family(ModelFamily(name="toy", model_types=("mistral",), read=read, builder=builder))
    assert "where: model families llama and toy" in str(error.value) and "seen: 'mistral'" in str(error.value)
    with pytest.raises(PipefitError, match="Two model families have one name"):
        register_model_family(ModelFamily(name="gpt2", model_types=("toy",), read=read, builder=builder))


def test_training_starts_with_the_initial_values_of_the_config(toy_site: Path, installed, monkeypatch) -> None:
    installed(toy_site, FAMILIES)
    load_plugins()
    monkeypatch.setitem(plans.CONFIGS, "toy", CONFIG)
    plans.model.cache_clear()
    plan = plans.plan("toy")
    value = initial_values(plan, plans.model("toy"))
    assert not value("layers.0.up.bias", (64,), ((0, 64),)).any()
    assert 0.15 < float(value("layers.0.up.weight", (64, 16), ((0, 64), (0, 16))).std()) < 0.25
    read = FAMILIES["toy-mlp"].read
    monkeypatch.setattr(type(read(CONFIG, "")), "initial", lambda config, name: InitialValue("ones"))
    assert bool((initial_values(plan, plans.model("toy"))("head.out.weight", (256, 16), ((0, 2), (0, 2))) == 1).all())
    monkeypatch.setattr(type(read(CONFIG, "")), "initial", lambda config, name: {}["bias"])
    with pytest.raises(PluginError, match=r"(?s)The model family 'toy-mlp' of toy failed.*KeyError: 'bias'"):
        initial_values(plan, plans.model("toy"))
    monkeypatch.setattr(type(read(CONFIG, "")), "initial", lambda config, name: "zeros")
    with pytest.raises(PluginError, match=r"(?s)'toy-mlp' of toy returned a value of a wrong type.*InitialValue"):
        initial_values(plan, plans.model("toy"))


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-mixtral", "tiny-qwen2", "tiny-qwen3"])
def test_a_built_in_configuration_states_what_the_roles_in_its_graphs_are(name: str) -> None:
    model = open_model(name)
    kinds, initials = parameter_kinds(model), family_initials(model)
    stds = {name: parameter_deviation(model, name) if kinds[name] == "normal" else 0.0 for name in kinds}
    assert initials == {name: InitialValue(kind, stds[name]) for name, kind in kinds.items()}


def test_an_unknown_kind_of_initial_value_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"(?s)initial value of a parameter is wrong.*'one'.*normal, uniform, ones, zeros"
    ):
        InitialValue("one")  # type: ignore[arg-type]


BROKEN = {
    "no builder module": ("toy_mlp.layers", "toy_mlp.missing", "No module named 'toy_mlp.missing'"),
    "no build": ("def build(config)", "def make(config)", "no attribute 'build'"),
    "a failing build": ("blocks = [", "blocks = config.missing = [", "layers.py, line"),
    "no list": ("    return [\n", "    return len([])\n    [\n", "allowed: list or tuple"),
    "no modules": ("    return [\n", "    return [\n        None,\n", "layer 0"),
    "a failing read": ("fields = ConfigFields(config, where)", "fields = config['missing']", "KeyError: 'missing'"),
    "another configuration": ("return ToyConfig(", "return dict(", "dict without to_config, stored_tensors, initial"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_family_that_fails_is_named(toy_site: Path, installed, pipefit, fault: str) -> None:
    before, after, message = BROKEN[fault]
    for path in (toy_site / "toy_mlp").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(before, after), encoding="utf-8")
    installed(toy_site, FAMILIES)
    words = ("--cluster", "2xH100", "--batch", "8", "--seq", "16")
    code, _, err = pipefit("plan", "--model", str(toy_site.parent / "my-model"), *words)
    assert code == 2 and "The model family 'toy-mlp' of toy" in err and message in err, err


def test_a_model_without_a_loss_is_refused(toy_site: Path, installed, pipefit) -> None:
    path = toy_site / "toy_mlp" / "layers.py"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "TokenLoss()" not in line]
    path.write_text("\n".join(lines), encoding="utf-8")
    installed(toy_site, FAMILIES)
    words = ("--cluster", "2xH100", "--batch", "8", "--seq", "16")
    code, _, err = pipefit("plan", "--model", str(toy_site.parent / "my-model"), *words)
    assert code == 2 and "The model has no loss." in err
    assert "where: the last layer, head" in err and "seen: an output of shape (B, T, 256)" in err


def test_layers_with_one_prefix_are_refused_and_a_tie_is_one_parameter(toy_site: Path, installed, pipefit) -> None:
    path = toy_site / "toy_mlp" / "layers.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('f"layers.{i}."', '"layers."'), encoding="utf-8")
    installed(toy_site, FAMILIES)
    words = ("--cluster", "2xH100", "--batch", "8", "--seq", "16")
    code, _, err = pipefit("plan", "--model", str(toy_site.parent / "my-model"), *words)
    assert code == 2 and "Two parameters have one name." in err and "seen: layers.up.weight" in err
    assert "where: layers layers.0, up.weight and layers.1, up.weight" in err
    layers = build_layers("toy-mlp", CONFIG | {"layers": 1})
    assert [layer.layer_name for layer in layers] == ["embed", "layers.0", "head", "loss"]
    layers[-2].out.weight = layers[0].table.weight
    finish_layers(layers, "meta", None)
    assert layers[-2].parameter_names == {"out.weight": "embed.table.weight"}


def test_the_first_parameters_have_the_initial_values_of_the_config(toy_site: Path, installed) -> None:
    installed(toy_site, FAMILIES)
    load_plugins()
    layers = build_layers("toy-mlp", CONFIG, device="cpu")
    assert [layer.layer_name for layer in layers] == ["embed", *(f"layers.{i}" for i in range(4)), "head", "loss"]
    assert not layers[1].up.bias.any() and 0.15 < float(layers[1].up.weight.detach().std()) < 0.25
