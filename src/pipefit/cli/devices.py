"""`pipefit devices`: the catalogue of devices, and the file of one as a start for a device of your own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipefit.cli._options import takes_options

if TYPE_CHECKING:
    from pipefit.cluster.catalogue import DataSheet


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesOptions:
    """Options of `pipefit devices`."""

    name: str | None = None
    "Print the file of this device: its name, an alias, or the name that nvidia-smi prints."


@takes_options(DevicesOptions, arguments=("name",), metavars={"name": "[NAME]"})
def command(options: DevicesOptions) -> None:
    """List the devices that a short cluster text may name, or print the file of one device."""
    from pipefit.cli._plans import print_tables
    from pipefit.cluster.catalogue import USER_FOLDER, device_sheets, find_sheet
    from pipefit.codec import dump_text
    from pipefit.plan.explain.text import TextTable

    if options.name is not None:
        print(dump_text(find_sheet(options.name)), end="")
        return
    columns = ("device", "bfloat16", "fp8", "memory", "bandwidth", "link in a host", "usual host")
    rows = tuple(_device_row(sheet) for sheet in device_sheets().values())
    print_tables([TextTable("devices (TFLOP/s without sparsity, MiB, GB/s)", columns, rows)])
    print(f"\nA device of your own: pipefit devices NAME prints a file to change; {USER_FOLDER} names its folder.")


def _device_row(sheet: DataSheet) -> tuple[str, ...]:
    peaks = sheet.peak_tflops
    return (
        sheet.name,
        f"{peaks['bfloat16']:g}" if "bfloat16" in peaks else f"{peaks['float32']:g} (float32)",
        f"{peaks['fp8']:g}" if "fp8" in peaks else "",
        f"{sheet.memory_mib:,}",
        f"{sheet.memory_gb_per_s:,g}",
        f"{sheet.link.name}, {sheet.link.gb_per_s:g}",
        f"{sheet.usual_host.devices}, {sheet.usual_host.network}",
    )
