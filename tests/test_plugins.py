"""Loading plug-ins: once, all of them, in one order; clear errors; nothing to pay where there are none."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.plugin_package import ROOT, installed, package_environment, page_examples, write_package

from pipefit.errors import PipefitError, PluginError
from pipefit.export import find_exporters
from pipefit.plan.placement.moves import MOVES
from pipefit.plugins import NamedRegistry, call_plugin, load_plugins

__all__ = ["installed"]


def test_modules_and_functions_are_loaded_once_in_the_order_of_packages(tmp_path: Path, installed, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("builtins.recorded_calls", calls, raising=False)
    later = {"toy_later.py": "import builtins\ndef register():\n    builtins.recorded_calls.append('later')\n"}
    first = {"toy_first.py": "import builtins\nbuiltins.recorded_calls.append('first')\n"}
    installed(write_package(tmp_path / "b", later, "toy_later:register", "zebra"))
    installed(write_package(tmp_path / "a", first, "toy_first", "ant"))
    assert load_plugins() == ("ant: toy_first", "zebra: toy_later:register")
    assert load_plugins() and calls == ["first", "later"]


def test_no_plugin_is_loaded_when_they_are_off(tmp_path: Path, installed, monkeypatch) -> None:
    installed(write_package(tmp_path, {"toy_bad.py": "raise RuntimeError\n"}, "toy_bad"))
    monkeypatch.setenv("PIPEFIT_PLUGINS", "off")
    assert load_plugins() == ()


def test_a_wrong_switch_names_the_allowed_values(monkeypatch, installed) -> None:
    monkeypatch.setenv("PIPEFIT_PLUGINS", "no")
    load_plugins.cache_clear()
    with pytest.raises(PluginError, match=r"where: PIPEFIT_PLUGINS\n  seen: 'no'\n  allowed: on, off"):
        load_plugins()


@pytest.mark.parametrize(
    ("source", "entry", "seen"),
    [
        ("import no_such_module\n", "toy_bad", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def register():\n    raise KeyError('x')\n", "toy_bad:register", "KeyError: 'x'"),
        ("", "toy_bad:missing", "AttributeError: module 'toy_bad' has no attribute 'missing'"),
        (
            "register = ['x']\n",
            "toy_bad:register",
            "TypeError: the entry point is list, neither a module nor a function",
        ),
        ("", "toy_gone", "ModuleNotFoundError: No module named 'toy_gone'"),
    ],
)
def test_a_plugin_that_fails_gives_one_error(
    tmp_path: Path, installed, pipefit, source: str, entry: str, seen: str
) -> None:
    installed(write_package(tmp_path, {"toy_bad.py": source}, entry))
    code, out, err = pipefit("schedule", "1f1b")
    assert (code, out) == (2, "")
    assert err == (
        "pipefit: A plug-in cannot be loaded.\n"
        f"  where: package toy, entry point toy = {entry}\n  seen: {seen}\n"
        "  try: mend or uninstall toy, or go on without plug-ins: PIPEFIT_PLUGINS=off\n"
    )


def test_a_process_goes_on_without_plugins(tmp_path: Path) -> None:
    write_package(tmp_path, {"toy_bad.py": "1 / 0\n"}, "toy_bad")
    environment = package_environment(tmp_path)
    words = [sys.executable, "-m", "pipefit", "schedule", "1f1b", "--csv"]
    stopped = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert stopped.returncode == 2 and "seen: ZeroDivisionError" in stopped.stderr and "Traceback" not in stopped.stderr
    again = subprocess.run(
        words, capture_output=True, text=True, env=environment | {"PIPEFIT_PLUGINS": "off"}, timeout=60
    )
    assert again.returncode == 0 and "0F0" in again.stdout


def test_help_and_version_load_no_plugin_and_no_metadata(tmp_path: Path, installed, pipefit) -> None:
    installed(write_package(tmp_path, {"toy_bad.py": "1 / 0\n"}, "toy_bad"))
    assert pipefit("--help")[0] == 0 and pipefit("--version")[0] == 0


def test_metadata_is_not_asked_without_plugins() -> None:
    """Importing importlib.metadata and asking it takes as long as a tenth of `pipefit --help`."""
    program = (
        "import sys\nfrom pipefit.plugins import load_plugins\nassert load_plugins() == ()\n"
        "assert 'importlib.metadata' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=package_environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr


EXPORTER = """
from pipefit.errors import PlanError
from pipefit.export import PlanExporter, register_exporter

def write(source):
    return {'length': 1}['width']

def count(source):
    return 5

def refuse(source):
    raise PlanError("This target takes one lane.")

for function in (write, count, refuse):
    register_exporter(PlanExporter(name=f"toy-{function.__name__}", summary="toy", suffix=".toy", write=function))
"""


def test_a_call_that_fails_names_the_plugin_its_package_and_the_line(tmp_path: Path, installed, pipefit) -> None:
    site = write_package(tmp_path / "site", {"toy_export.py": EXPORTER}, "toy_export", "walk-ext")
    installed(site, find_exporters())
    plan = tmp_path / "plan.json"
    words = ("--batch", "16", "--seq", "128", "--fix", "stages=2", "-o", str(plan))
    assert pipefit("plan", "--model", "tiny", "--cluster", "2xH100", *words)[0] == 0
    code, _, err = pipefit("export", str(plan), "--to", "toy-write")
    assert code == 2 and err == (
        "pipefit: The exporter 'toy-write' of walk-ext failed.\n"
        f"  where: toy_export.write, {site / 'toy_export.py'}, line 6\n  seen: KeyError: 'width'\n"
        "  try: mend it, or go on without plug-ins: PIPEFIT_PLUGINS=off\n"
    )
    code, _, err = pipefit("export", str(plan), "--to", "toy-count")
    assert code == 2 and "The exporter 'toy-count' of walk-ext returned a value of a wrong type." in err
    assert "where: toy_export.count" in err and "seen: int: 5" in err and "allowed: str" in err
    code, _, err = pipefit("export", str(plan), "--to", "toy-refuse")
    assert (code, err) == (2, "pipefit: This target takes one lane.\n"), "its own message stays"


def test_faults_of_pipefit_keep_their_traceback() -> None:
    with pytest.raises(AttributeError):
        call_plugin("exporter 'torch-csv'", find_exporters()["torch-csv"].write, None)


def test_two_entries_of_one_name_are_refused() -> None:
    registry = NamedRegistry("toys", {"ball": 1})
    assert registry.add_entry("kite", 2) == 2 and dict(registry) == {"ball": 1, "kite": 2}
    assert registry.add_entry("ball", 1) == 1
    with pytest.raises(PipefitError, match="Two toys have one name") as error:
        registry.add_entry("ball", 3)
    assert "seen: 'ball'" in str(error.value) and "other than ball, kite" in str(error.value)


def test_the_example_of_the_page_is_loaded(tmp_path: Path, installed) -> None:
    examples = page_examples("write-a-plugin-package.md")
    project = tomllib.loads(examples["pyproject.toml"])["project"]
    assert project["name"].replace("-", "_") == "toy_plugin", "hatchling ships the module of the package's name"
    entries = project["entry-points"]["pipefit.plugins"]
    installed(write_package(tmp_path, {"toy_plugin.py": examples["toy_plugin.py"]}, entries["toy"]), MOVES)
    assert load_plugins() == ("toy: toy_plugin:register",) and list(MOVES) == ["reverse"]


def test_the_page_names_register_functions_that_exist() -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-plugin-package.md").read_text(encoding="utf-8")
    names = re.findall(r"`(pipefit\.[\w.]+)\.(register_\w+)`", page)
    assert len(names) == 8 and all(callable(getattr(importlib.import_module(module), name)) for module, name in names)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs" / "how-to").glob("add-*.md")))
def test_a_page_is_short(page: str) -> None:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    assert len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) <= 400
