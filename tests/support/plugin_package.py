"""Packages outside of pipefit, for tests of plug-ins: made of the examples of a page, found by their entry point."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipefit.plugins import NamedRegistry, load_plugins

ROOT = Path(__file__).resolve().parents[2]


def page_examples(page: str) -> dict[str, str]:
    """Return the examples of a page by the file that their first line names: `# toy_rack/reader.py`."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(?:# )?([\w./-]+\.\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no example"
    return dict(blocks)


def page_blocks(page: str) -> list[str]:
    """Return the Python examples of a page, in their order."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def write_package(folder: Path, files: Mapping[str, str], entry: str, name: str = "toy") -> Path:
    """Write an installed package with this entry point (`MODULE` or `MODULE:FUNCTION`), as pip would."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(f"[pipefit.plugins]\n{name} = {entry}\n", encoding="utf-8")
    return folder


def package_environment(*folders: Path) -> dict[str, str]:
    """Return the environment of a process that has these packages installed."""
    path = os.pathsep.join([*map(str, folders), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Install packages in this process: `installed(folder, registry, ...)`. The test ends with the registries and
    plug-ins that it began with; modules of the packages have names that begin with `toy_`."""
    before = set(sys.modules)

    def install(folder: Path, *registries: NamedRegistry) -> None:
        for registry in registries:
            monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.syspath_prepend(str(folder))
        load_plugins.cache_clear()

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("toy_"):
            del sys.modules[name]
    load_plugins.cache_clear()
