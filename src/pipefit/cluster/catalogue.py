"""The catalogue of devices: one JSON file a device in `devices/`, and in the folder that PIPEFIT_DEVICES names.

A file holds the vendor's public figures: dense (not sparse) peaks, memory as the driver reports it, memory bandwidth,
the link between two devices of a host, and the names of the device on the command line and in drivers. A file of the
user replaces the one of the same name. docs/reference/devices.md explains the fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipefit.codec import load_file
from pipefit.errors import ClusterError, most_like
from pipefit.units import parse_bandwidth

PEAKS = ("float64", "float32", "tf32", "float16", "bfloat16", "fp8", "fp4")
"""Names of the peaks that a file may have."""

USER_FOLDER = "PIPEFIT_DEVICES"
"""Environment variable that names a folder of the user's device files."""

_FOLDER = Path(__file__).parent / "devices"
NAME = r"[A-Za-z][\w-]*|\d{4}"
"""Names of devices as a pattern: so that short cluster texts tell them from counts."""

_VENDORS = frozenset(("nvidia", "amd", "tesla", "geforce", "quadro", "instinct", "intel", "habana", "gpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetLink:
    """The usual link between two devices of a host."""

    name: str
    gb_per_s: float
    "One direction, in GB/s (powers of 1000), of one device."


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualHost:
    """The host in which a device is usually sold."""

    devices: int
    "Devices that share the link."
    network: str
    "Network cards of the host, such as `8x400Gbit/s`."


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """Public figures of one device."""

    name: str
    peak_tflops: Mapping[str, float]
    "Dense peaks by number type (`PEAKS`) in TFLOP/s; products of 16 bits are added up in float32."
    memory_mib: int
    "As the driver reports it."
    memory_gb_per_s: float
    link: SheetLink
    usual_host: UsualHost
    sources: Mapping[str, str]
    "The documents behind the figures, by field."
    nvlink_gb_per_s: float | None = None
    "One NVLink in one direction, in GB/s; None: NVLinks of the device are not known."
    slot_gb_per_s: float = 32.0
    "The PCIe slot in one direction, in GB/s; by default 16 lanes of generation 4."
    vendor: str = ""
    "Only devices of the same vendor are named as better ones."
    aliases: tuple[str, ...] = ()
    "Other names for the command line."
    reported_names: tuple[str, ...] = ()
    "Names that nvidia-smi, rocm-smi, hl-smi and PyTorch print."
    product_share: float | None = None
    "Share of the bfloat16 peak that large matrix products reach; None: not measured."
    attention_share: float | None = None
    "Share of the peak that attention in one kernel reaches; None: not measured."


def network_bandwidth(text: str, where: str) -> float:
    """Return the bytes/s of `400Gbit/s`, or of `8x400Gbit/s`: eight network cards. Raises PipefitError."""
    cards = re.fullmatch(r"(\d+)x(.+)", text)
    return (int(cards[1]) if cards else 1) * parse_bandwidth(cards[2] if cards else text, where)


def device_sheets() -> Mapping[str, DataSheet]:
    """Return the sheets by name: those of pipefit, then those of the user. Raises ClusterError or FormatError for a
    wrong file."""
    return _read_sheets(os.environ.get(USER_FOLDER, ""))


def find_sheet(name: str, where: str | None = None) -> DataSheet:
    """Return the sheet of a device by its name, an alias, or the name that a driver prints.

    Raises ClusterError with the nearest names for an unknown device; `where` names the input.
    """
    sheets, key = device_sheets(), reported_device(name)
    if key is None:
        known = _device_names(os.environ.get(USER_FOLDER, ""))
        near = [known[word] for word in most_like(_plain_words(name), known)]
        guess = f"did you mean {near[0]}? Or describe it" if near else "describe it"
        raise ClusterError(
            f"No data sheet is known for the device {name!r}.",
            where=where,
            seen=name,
            allowed=", ".join(sheets),
            next_step=f"{guess}: `pipefit devices {near[0] if near else 'H100'}` prints a file to change; save it in a "
            f"folder that {USER_FOLDER} names",
        )
    return sheets[key]


def reported_device(text: str) -> str | None:
    """Return the name of the device that a driver calls `text` (`NVIDIA A100-SXM4-80GB` -> `A100-80`); None if
    unknown."""
    return _device_names(os.environ.get(USER_FOLDER, "")).get(_plain_words(text))


@cache
def _read_sheets(user_folder: str) -> Mapping[str, DataSheet]:
    sheets: dict[str, DataSheet] = {}
    paths: dict[str, Path] = {}
    for folder in (_FOLDER, *([Path(user_folder)] if user_folder else [])):
        if not folder.is_dir():
            raise ClusterError("The folder of device files is not there.", where=USER_FOLDER, seen=folder)
        for path in sorted(folder.glob("*.json")):
            sheet = load_file(DataSheet, path)
            _check_sheet(sheet, path)
            if sheet.name in paths and paths[sheet.name].parent == folder:
                raise ClusterError(
                    "Two files describe one device.",
                    where=f"{path}: name",
                    seen=f"{sheet.name!r}, also in {paths[sheet.name].name}",
                    allowed="one file a device in a folder",
                )
            sheets[sheet.name], paths[sheet.name] = sheet, path
    _check_names(sheets, paths)
    return sheets


def _check_names(sheets: Mapping[str, DataSheet], paths: Mapping[str, Path]) -> None:
    """Raise ClusterError if two devices share a name, an alias or a reported name. It names the file of the user."""
    owners: dict[str, str] = {}
    for sheet in sorted(sheets.values(), key=lambda sheet: paths[sheet.name].parent != _FOLDER):
        for field in ("name", "aliases", "reported_names"):
            value = getattr(sheet, field)
            for text in (value,) if field == "name" else value:
                owner = owners.setdefault(_plain_words(text), sheet.name)
                if owner != sheet.name:
                    raise ClusterError(
                        f"This is a name of another device, {owner}.",
                        where=f"{paths[sheet.name]}: {field}",
                        seen=repr(text),
                        allowed=f"names that {owner} does not have",
                        next_step=f"change or remove it; a file with the name {owner} replaces that device",
                    )


@cache
def _device_names(user_folder: str) -> Mapping[str, str]:
    """Return the device by each of its names, reduced to plain words."""
    sheets = _read_sheets(user_folder).values()
    aliases = {_plain_words(text): sheet.name for sheet in sheets for text in sheet.aliases}
    reported = {_plain_words(text): sheet.name for sheet in sheets for text in sheet.reported_names}
    return aliases | reported | {_plain_words(sheet.name): sheet.name for sheet in sheets}


def _plain_words(text: str) -> str:
    """Return a name in lower case, its words joined by `-`, without the words of vendors."""
    words = re.split(r"[^a-z0-9.]+", text.lower())
    return "-".join(word for word in words if word and word not in _VENDORS)


def _check_sheet(sheet: DataSheet, path: Path) -> None:
    for name in (sheet.name, *sheet.aliases):
        if re.fullmatch(NAME, name) is None:
            raise ClusterError(
                "The name of a device begins with a letter and has letters, digits and hyphens.",
                where=f"{path}: name",
                seen=repr(name),
            )
    if "peaks" not in sheet.sources:
        raise ClusterError(
            "A device file names the document behind its peaks.",
            where=f"{path}: sources",
            seen=", ".join(sheet.sources) or "nothing",
            next_step='add "peaks": "the name of the document"',
        )
    network_bandwidth(sheet.usual_host.network, f"{path}: usual_host.network")
    unknown = [key for key in sheet.peak_tflops if key not in PEAKS]
    if unknown or "float32" not in sheet.peak_tflops:
        raise ClusterError(
            "A device file has a peak for float32, and may have others.",
            where=f"{path}: peak_tflops",
            seen=", ".join(sheet.peak_tflops) or "nothing",
            allowed=", ".join(PEAKS),
        )
    _check_figures(sheet, path)


def _check_figures(sheet: DataSheet, path: Path) -> None:
    figures = {
        **{f"peak_tflops.{key}": value for key, value in sheet.peak_tflops.items()},
        "memory_mib": sheet.memory_mib,
        "memory_gb_per_s": sheet.memory_gb_per_s,
        "link.gb_per_s": sheet.link.gb_per_s,
        "nvlink_gb_per_s": sheet.nvlink_gb_per_s,
        "slot_gb_per_s": sheet.slot_gb_per_s,
        "usual_host.devices": sheet.usual_host.devices,
    }
    for field, value in figures.items():
        if value is not None and not 0 < value < float("inf"):
            raise ClusterError(
                "This figure of a device is not positive.", where=f"{path}: {field}", seen=value, allowed="above 0"
            )
    for field, share in (("product_share", sheet.product_share), ("attention_share", sheet.attention_share)):
        if share is not None and not 0 < share <= 1:
            raise ClusterError(
                "This is a share of the peak.", where=f"{path}: {field}", seen=share, allowed="above 0, at most 1"
            )
