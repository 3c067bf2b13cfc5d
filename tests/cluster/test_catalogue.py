"""The catalogue of devices: each file, names that people and drivers use, files of the user, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.cluster import open_cluster
from pipefit.cluster.catalogue import USER_FOLDER, DataSheet, device_sheets, find_sheet, reported_device
from pipefit.cluster.kinds import data_sheet_kind, sheet_peaks
from pipefit.codec import from_data
from pipefit.errors import ClusterError, PipefitError

SHEETS = device_sheets()


@pytest.mark.parametrize("name", SHEETS)
def test_figures_of_a_device_agree_with_each_other(name: str) -> None:
    """Vendors build the units of narrower floats as multiples of wider ones."""
    sheet, peaks = SHEETS[name], sheet_peaks(SHEETS[name])
    assert peaks["bfloat16"] >= peaks["tf32"] >= peaks["float32"]
    if "bfloat16" in sheet.peak_tflops and name != "Gaudi3":
        assert peaks["float16"] == peaks["bfloat16"]
        assert peaks.get("fp8", 2 * peaks["bfloat16"]) == pytest.approx(2 * peaks["bfloat16"], rel=0.02)
    assert 10_000 < sheet.memory_mib < 300_000 and 300 <= sheet.memory_gb_per_s <= 8000
    assert sheet.link.gb_per_s <= sheet.memory_gb_per_s and sheet.usual_host.devices in (1, 2, 4, 8, 16, 72)
    assert {"peaks", "memory_mib"} <= sheet.sources.keys()


@pytest.mark.parametrize("name", SHEETS)
def test_links_of_a_device_agree_with_each_other(name: str) -> None:
    """A device between PCIe slots has the slot as its link, any other a whole number of NVLinks if it has one."""
    sheet = SHEETS[name]
    if sheet.link.name.startswith("PCIe"):
        assert sheet.slot_gb_per_s == sheet.link.gb_per_s and sheet.nvlink_gb_per_s is None
    assert (sheet.nvlink_gb_per_s is not None) == sheet.link.name.startswith("NVLink")
    if sheet.nvlink_gb_per_s is not None:
        assert sheet.link.gb_per_s % sheet.nvlink_gb_per_s == 0


@pytest.mark.parametrize("name", SHEETS)
def test_every_device_joins_two_usual_hosts(name: str) -> None:
    usual = SHEETS[name].usual_host
    cluster = open_cluster(f"2x{usual.devices}x{name}:{usual.network}")
    assert cluster.kinds[name] == data_sheet_kind(name)[0]


def test_names_belong_to_one_device() -> None:
    names = [name.lower() for sheet in SHEETS.values() for name in (sheet.name, *sheet.aliases)]
    printed = [name.lower() for sheet in SHEETS.values() for name in sheet.reported_names]
    assert len(set(names)) == len(names) and len(set(printed)) == len(printed)
    for sheet in SHEETS.values():
        assert sheet.reported_names
        for name in (sheet.name, *sheet.aliases, *sheet.reported_names):
            assert find_sheet(name) is sheet, name


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Quadro K620", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ],
)
def test_drivers_names_are_known(printed: str, name: str | None) -> None:
    assert reported_device(printed) == name


def test_a_device_without_narrow_units_computes_in_float32() -> None:
    peaks = sheet_peaks(SHEETS["V100"])
    assert peaks["bfloat16"] == peaks["tf32"] == peaks["float32"] < peaks["float16"]
    assert "fp8" not in sheet_peaks(SHEETS["A100-80"])


def test_published_ratios() -> None:
    """Figures known from elsewhere, and the ratios of neighbouring kinds."""
    a100, h100 = SHEETS["A100-80"].peak_tflops, SHEETS["H100"].peak_tflops
    assert a100["bfloat16"] == 16 * a100["float32"] == 2 * a100["tf32"] == 312
    assert h100["bfloat16"] == SHEETS["H200"].peak_tflops["bfloat16"] == 989
    assert SHEETS["H100"].memory_gb_per_s == 3350 and SHEETS["H200"].memory_gb_per_s == 4800
    assert SHEETS["H100"].memory_mib == 81559, "not 80e9 bytes"


def written_device(**changes: Any) -> dict[str, Any]:
    """Return the data of a device file, as a user would write it."""
    data = {
        "name": "Mine-1",
        "peak_tflops": {"float64": 1.0, "float32": 50.0, "bfloat16": 400.0},
        "memory_mib": 65536,
        "memory_gb_per_s": 2000,
        "link": {"name": "bridge", "gb_per_s": 100},
        "usual_host": {"devices": 4, "network": "200Gbit/s"},
        "sources": {"peaks": "our own"},
        "reported_names": ["Mine One 64GB"],
    }
    return data | changes


def test_a_file_of_the_user_is_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(written_device()), encoding="utf-8")
    (tmp_path / "h100.json").write_text(
        json.dumps(written_device(name="H100", reported_names=["NVIDIA H100 80GB HBM3"])), encoding="utf-8"
    )
    monkeypatch.setenv(USER_FOLDER, str(tmp_path))
    cluster = open_cluster("2x4xMine-1:200Gbit/s")
    assert cluster.kinds["Mine-1"].peak_flops_per_s["bfloat16"] == 400e12
    assert reported_device("Mine One 64GB") == "Mine-1"
    assert data_sheet_kind("H100")[0].peak_flops_per_s["bfloat16"] == 400e12, "the user's file replaces ours"
    monkeypatch.delenv(USER_FOLDER)
    assert data_sheet_kind("H100")[0].peak_flops_per_s["bfloat16"] == 989e12
    with pytest.raises(ClusterError, match="No data sheet is known for the device 'Mine-1'") as error:
        open_cluster("4xMine-1")
    assert USER_FOLDER in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_tflops": {"float64": 1.0}}, ["has a peak for float32", "mine.json: peak_tflops"]),
        ({"peak_tflops": {"float64": 1, "float32": 1, "int4": 9}}, ["seen: float64, float32, int4"]),
        ({"slot_gb_per_s": -1.0}, ["not positive", "slot_gb_per_s", "above 0"]),
        ({"nvlink_gb_per_s": 0.0}, ["not positive", "nvlink_gb_per_s", "above 0"]),
        ({"memory_mib": 0}, ["not positive", "memory_mib", "above 0"]),
        ({"name": "my gpu"}, ["letters, digits and hyphens", "'my gpu'"]),
        ({"name": "7900XTX"}, ["begins with a letter", "'7900XTX'"]),
        ({"sources": {}}, ["names the document behind its peaks", "sources"]),
        ({"usual_host": {"devices": 4, "network": "banana"}}, ["usual_host.network", "not a number with a unit"]),
        ({"product_share": 80.0}, ["share of the peak", "product_share"]),
        ({"memory": 1}, ["memory"]),
        (
            {"aliases": ["A100-80GB"]},
            ["a name of another device, A100-80.", "mine.json: aliases", "seen: 'A100-80GB'", "change or remove it"],
        ),
        ({"reported_names": ["NVIDIA T4"]}, ["a name of another device, T4.", "mine.json: reported_names"]),
        ({"name": "h100-sxm"}, ["a name of another device, H100.", "mine.json: name"]),
        ({"name": "H100", "aliases": ["H200"], "reported_names": []}, ["another device, H200.", "mine.json: aliases"]),
    ],
)
def test_a_wrong_file_is_told(
    changes: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(written_device(**changes)), encoding="utf-8")
    monkeypatch.setenv(USER_FOLDER, str(tmp_path))
    with pytest.raises(PipefitError) as error:
        open_cluster("8xH100")
    for word in words:
        assert word in str(error.value)


def test_two_files_of_one_device_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first.json", "second.json"):
        (tmp_path / name).write_text(json.dumps(written_device()), encoding="utf-8")
    monkeypatch.setenv(USER_FOLDER, str(tmp_path))
    with pytest.raises(
        ClusterError, match=r"Two files describe one device(.|\n)*'Mine-1', also in first.json"
    ) as error:
        open_cluster("8xH100")
    assert "second.json: name" in str(error.value)


def test_an_absent_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_FOLDER, str(tmp_path / "nowhere"))
    with pytest.raises(ClusterError, match="folder of device files is not there") as error:
        open_cluster("8xH100")
    assert USER_FOLDER in str(error.value)


def test_the_command_lists_devices_and_prints_a_file() -> None:
    runner = CliRunner()
    listed = runner.invoke(build_app(), ["devices"]).output
    assert all(name in listed for name in SHEETS)
    printed = json.loads(runner.invoke(build_app(), ["devices", "NVIDIA H100 80GB HBM3"]).output)
    assert from_data(DataSheet, printed, "printed") == SHEETS["H100"]


def test_the_page_names_every_device_and_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "devices.md").read_text(encoding="utf-8")
    for name in (*SHEETS, *DataSheet.__dataclass_fields__, USER_FOLDER):
        assert name in text, name
