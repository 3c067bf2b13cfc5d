"""The cache of captured models: equal models, a fresh capture when anything that matters changes, and no failure
because of the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.plugin_package import package_environment, page_examples, write_package

from pipefit.codec import to_data
from pipefit.errors import CaptureWarning, ModelError
from pipefit.model import capture_cache
from pipefit.model.capture import layers as capture
from pipefit.model.families import FAMILIES
from pipefit.model.families.build import has_written_graphs
from pipefit.model.graph import Model
from pipefit.model.ops import KINDS
from pipefit.model.registry import builtin_names, open_family, open_model, resolve_model

ROOT = Path(__file__).resolve().parents[2]
USER_MODEL = """
from torch import nn

from pipefit.model.families.common import TokenLoss


class Embed(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens)


def build():
    return [Embed(256, 8), nn.Linear(8, 256), TokenLoss()]
"""


@pytest.fixture(autouse=True)
def nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture the built-in families too, as those of plug-ins."""
    monkeypatch.setattr("pipefit.model.registry.has_written_graphs", lambda family: False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, switched on; the folder of its models."""
    monkeypatch.setenv("PIPEFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(capture_cache, "_STARTED_S", float("inf"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The families that are captured from here on."""
    families: list[str] = []
    original = capture.capture_family

    def count_capture(family: str, config: dict[str, object]) -> Model:
        families.append(family)
        return original(family, config)

    monkeypatch.setattr(capture, "capture_family", count_capture)
    return families


def stored_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def key_of(name: str) -> str | None:
    description = resolve_model(name)
    return capture_cache.cache_key(description.family, description.config)


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-qwen3-moe", "multimodal-tiny"])
def test_a_stored_model_is_equal_to_the_captured_one(folder: Path, captures: list[str], name: str) -> None:
    fresh, stored = open_model(name), open_model(name)
    assert len(captures) == 1 and len(stored_files(folder)) == 1
    assert stored == fresh and stored is not fresh and stored.hash == fresh.hash
    assert to_data(stored) == to_data(fresh) and repr(stored.modules) == repr(fresh.modules)
    assert stored == capture.capture_family(fresh.family, fresh.config)


def test_every_builtin_model_has_its_own_key(folder: Path) -> None:
    described = [resolve_model(name) for name in builtin_names()]
    keys = [capture_cache.cache_key(item.family, item.config) for item in described]
    assert None not in keys and keys == [key_of(name) for name in builtin_names()]
    assert len(set(keys)) == len({json.dumps([item.family, dict(item.config)]) for item in described}) > 10


def test_a_configuration_file_is_cached_by_its_contents(folder: Path, tmp_path: Path, captures: list[str]) -> None:
    config = dict(resolve_model("tiny-llama").config)
    for number, layers in enumerate((2, 2, 3)):
        path = tmp_path / f"model{number}" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
        assert sum(layer.name.startswith("layers.") for layer in open_model(str(path.parent)).layers) == layers
    assert captures == ["llama", "llama"] and len(stored_files(folder)) == 2


def test_a_change_of_pipefit_torch_or_python_gives_another_key(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key_of("tiny")]
    source = tmp_path / "pipefit"
    (source / "model" / "capture").mkdir(parents=True)
    monkeypatch.setattr(capture_cache, "_PACKAGE", source)
    layers = source / "model" / "capture" / "layers.py"
    for path, text in ((source / "codec.py", "a = 1"), (layers, "a = 1"), (layers, "a = 2")):
        path.write_text(text, encoding="utf-8")
        keys.append(key_of("tiny"))
    os.utime(layers, (1000, 1000))
    assert key_of("tiny") == keys[-1], "contents count, not times"
    for package in ("torch-9.9", "sympy-9.9"):
        (tmp_path / "site" / f"{package}.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        keys.append(key_of("tiny"))
    (tmp_path / "site" / "unrelated-1.0.dist-info").mkdir()
    assert key_of("tiny") == keys[-1]
    monkeypatch.setattr(sys, "version", "3.99.0")
    keys.append(key_of("tiny"))
    assert None not in keys and len(set(keys)) == len(keys) == 7


def test_source_that_changed_since_the_start_is_not_trusted(
    folder: Path, captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_cache, "_STARTED_S", Path(capture.__file__).stat().st_mtime - 1)
    assert key_of("tiny") is None
    assert open_model("tiny") == open_model("tiny")
    assert captures == ["llama", "llama"] and stored_files(folder) == []


def test_without_torch_in_the_environment_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    assert key_of("tiny") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"B"', '"T"', 1),
        lambda text: json.dumps([1]),
        lambda text: text.replace('"family"', '"tribe"', 1),
    ],
    ids=["cut", "empty", "changed", "list", "renamed"],
)
def test_a_damaged_file_is_ignored_and_written_again(folder: Path, captures: list[str], damage) -> None:
    model = open_model("tiny")
    path = folder / stored_files(folder)[0]
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    assert open_model("tiny") == model and len(captures) == 2
    assert path.read_text(encoding="utf-8") == text and stored_files(folder) == [path.name]
    path.write_bytes(b"\xff\xfe\x00")
    assert open_model("tiny") == model and len(captures) == 3


def test_a_file_of_another_model_is_not_used(folder: Path) -> None:
    open_model("tiny")
    gpt2, path = key_of("tiny-gpt2"), folder / stored_files(folder)[0]
    path.rename(folder / f"{gpt2}.json")
    assert open_model("tiny-gpt2").family == "gpt2"


@pytest.mark.parametrize("choice", ["file/cache", "file"])
def test_a_folder_that_cannot_be_written_is_skipped(
    tmp_path: Path, captures: list[str], monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    (tmp_path / "file").write_text("here", encoding="utf-8")
    monkeypatch.setenv("PIPEFIT_CACHE", str(tmp_path / choice))
    assert open_model("tiny") == open_model("tiny") and len(captures) == 2
    assert (tmp_path / "file").read_text(encoding="utf-8") == "here"


@pytest.mark.parametrize("call", ["mkstemp", "fdopen", "replace"])
def test_a_write_that_fails_leaves_no_part_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(tempfile if call == "mkstemp" else os, call, fail)
        model = open_model("tiny")
    assert stored_files(folder) == []
    assert open_model("tiny") == model and len(stored_files(folder)) == 1


def test_the_newest_files_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "MOST_FILES", 3)
    folder.mkdir(parents=True)
    for age in range(5):
        (folder / f"old{age}.json").write_text("{}", encoding="utf-8")
        os.utime(folder / f"old{age}.json", (1000 - age, 1000 - age))
    open_model("tiny")
    assert stored_files(folder) == sorted([f"{key_of('tiny')}.json", "old0.json", "old1.json"])


def test_the_switch_and_the_folders(tmp_path: Path, captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert os.environ["PIPEFIT_CACHE"] == "off" and capture_cache.cache_folder() is None
    open_model("tiny")
    assert captures == ["llama"] and not list(tmp_path.iterdir())
    monkeypatch.setenv("PIPEFIT_CACHE", "~/mine")
    assert capture_cache.cache_folder() == tmp_path / "home" / "mine" / "models"
    monkeypatch.delenv("PIPEFIT_CACHE")
    assert capture_cache.cache_folder() == tmp_path / "home" / ".cache" / "pipefit" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert capture_cache.cache_folder() == tmp_path / "home" / ".cache" / "pipefit" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert capture_cache.cache_folder() == tmp_path / "shared" / "pipefit" / "models"


def test_models_of_users_are_captured_each_time(folder: Path, tmp_path: Path, captures: list[str]) -> None:
    (tmp_path / "model.py").write_text(USER_MODEL, encoding="utf-8")
    source = f"{tmp_path / 'model.py'}:build"
    assert open_model(source) == open_model(source)
    assert captures == ["user", "user"] and stored_files(folder) == []


def test_models_with_opaque_layers_warn_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "KINDS", {kind: value for kind, value in KINDS.items() if kind != "attention"})
    monkeypatch.setattr(capture, "_REMEMBERED", {})
    for _ in range(2):
        with pytest.warns(capture.OpaqueLayerWarning, match=r"layer layers\.0 \(.*stays opaque"):
            open_model("tiny")
    assert stored_files(folder) == []


def write_library_model(folder: Path, **fields: object) -> str:
    """A directory with the config.json of a small encoder of `transformers`, which its capture warns of."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = {"model_type": "bert", "vocab_size": 32, "max_position_embeddings": 16, "tie_word_embeddings": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **fields}), encoding="utf-8")
    return str(folder)


def test_a_class_of_the_library_is_stored_with_its_warnings(folder: Path, tmp_path: Path, captures: list[str]) -> None:
    source = write_library_model(tmp_path / "model")
    with pytest.warns(CaptureWarning, match="attention sees later tokens") as first:
        fresh = open_model(source, 8)
    with pytest.warns(CaptureWarning, match="attention sees later tokens") as second:
        stored = open_model(source, 8)
    assert stored == fresh and stored.hash == fresh.hash
    assert [str(entry.message) for entry in second] == [str(entry.message) for entry in first]
    assert captures == ["user"] and len(stored_files(folder)) == 1


def test_a_class_of_the_library_is_stored_by_fields_tokens_and_versions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_library_model(tmp_path / "model")
    described = [resolve_model(source, 8), resolve_model(source, 16)]
    write_library_model(tmp_path / "wider", intermediate_size=48)
    described.append(resolve_model(str(tmp_path / "wider"), 8))
    keys = [capture_cache.cache_key(entry.family, entry.config) for entry in described]
    installed = capture_cache._installed_versions(())
    assert any(name.startswith("transformers-") for name in installed)
    newer = [f"{name}.1" if name.startswith("transformers-") else name for name in installed]
    monkeypatch.setattr(capture_cache, "_installed_versions", lambda names: newer)
    keys.append(capture_cache.cache_key(described[0].family, described[0].config))
    assert None not in keys and len(set(keys)) == 4


def test_a_run_takes_the_stored_model(folder: Path, captures: list[str]) -> None:
    from tests.support import worker_plans as plans

    from pipefit.run.session.staleness import planned_model

    plan = plans.plan("llama", stages=2)
    stored = open_family(plan.model.family, plan.model.config)
    del captures[:]
    assert planned_model(plan) == stored and captures == []


def test_graphs_that_pipefit_writes_are_not_captured(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.model.registry.has_written_graphs", has_written_graphs)
    described = resolve_model("tiny")
    written = open_family(described.family, described.config)
    assert captures == [] and written == capture.capture_family(described.family, described.config)


def test_errors_are_those_of_a_capture(folder: Path) -> None:
    config = resolve_model("tiny").config
    for family, wrong in (("lama", config), ("llama", {**config, "hidden_size": -1})):
        with pytest.raises(ModelError) as cached:
            open_family(family, wrong)
        with pytest.raises(ModelError) as direct:
            capture.capture_family(family, wrong)
        assert str(cached.value) == str(direct.value)
    assert stored_files(folder) == []


def test_a_configuration_that_is_not_json_is_not_cached(folder: Path, captures: list[str]) -> None:
    config = {**resolve_model("tiny").config, "extra": object()}
    assert open_family("llama", config) == open_family("llama", config)
    assert len(captures) == 2 and stored_files(folder) == []


def test_a_reader_without_source_is_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace
    from functools import partial

    family = FAMILIES["llama"]
    entries = dict(FAMILIES)
    monkeypatch.setattr(FAMILIES, "_entries", entries)
    for read, builder in ((partial(family.read), family.builder), (family.read, "no_such_package.layers")):
        entries["llama"] = replace(family, read=read, builder=builder)
        assert capture_cache.cache_key("llama", resolve_model("tiny").config) is None


PLAN = [
    "plan", "--model", "tiny", "--cluster", "2xH100", "--batch", "4", "--seq", "64", "--fix", "stages=2", "--fix",
    "shards=1", "--fix", "schedule=gpipe", "--fix", "microbatches=2", "--fix", "groups=false", "--fix", "slices=1",
    "--fix", "recompute=none",
]  # fmt: skip


def run_program(program: str, environment: dict[str, str]) -> tuple[str, set[str]]:
    """Run a Python program in a process; return its output and the packages that it imported."""
    program = f"import sys\n{program}\nprint(*{{name.partition('.')[0] for name in sys.modules}})\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    text, _, names = done.stdout.rstrip("\n").rpartition("\n")
    return text, set(names.split())


def test_planning_a_language_model_imports_no_torch(tmp_path: Path) -> None:
    program = (
        f"from pipefit.cli import main\nsys.argv = ['pipefit', *{PLAN!r}]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code"
    )
    environment = {**package_environment(), "PIPEFIT_CACHE": str(tmp_path)}
    printed, imported = run_program(program, environment)
    assert "predicted step" in printed and not {"torch", "transformers"} & imported
    assert stored_files(tmp_path / "models") == []


def test_a_family_of_a_plugin_is_captured_again_when_its_package_changes(tmp_path: Path) -> None:
    config = {"model_type": "toy_mlp", "vocab_size": 256, "width": 16, "layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files = {"toy_mlp/__init__.py": "", **page_examples("add-a-model-family.md")}
    site = write_package(tmp_path / "site", files, "toy_mlp.config")
    environment = {**package_environment(site), "PIPEFIT_CACHE": str(tmp_path / "cache")}
    program = (
        "from pipefit.model.registry import open_model, resolve_model\n"
        "from pipefit.model.capture_cache import cache_key\n"
        "from pipefit.plugins import load_plugins\n"
        f"load_plugins()\nmodel = {str(tmp_path / 'config.json')!r}\n"
        "print(cache_key('toy-mlp', resolve_model(model).config))"
    )
    opening = f"{program}\nprint(open_model(model).hash)"
    (first, captured), (again, cached) = run_program(opening, environment), run_program(opening, environment)
    assert "torch" in captured and "torch" not in cached and again == first
    keys = [first.split()[0]]
    assert stored_files(tmp_path / "cache" / "models") == [f"{keys[0]}.json"]
    with (site / "toy_mlp" / "layers.py").open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    keys.append(run_program(program, environment)[0])
    (site / "toy_mlp" / "table.txt").write_text("1 2 3", encoding="utf-8")
    keys.append(run_program(program, environment)[0])
    (site / "toy-1.0.dist-info").rename(site / "toy-1.1.dist-info")
    keys.append(run_program(program, environment)[0])
    (site / "other-1.0.dist-info").mkdir()
    keys.append(run_program(program, environment)[0])
    assert run_program(program, environment)[0] == keys[-1]
    assert len(set(keys)) == len(keys) and "None" not in keys
