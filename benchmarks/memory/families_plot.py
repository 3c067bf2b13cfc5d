"""Draws the result of `families.py` as one self-contained SVG: three families by device, and all families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

INK, SOFT, GRID = "#1c2733", "#4a5a6a", "#dde4ea"
COLOURS = {"1f1b": "#8da2b8", "v-half": "#2f7ed8", "v-min": "#1b9e77"}
NAMES = {"1f1b": "1F1B", "v-half": "V-Half", "v-min": "V-Min"}
WIDTH, HEIGHT = 960, 400
TOP, FOOT, LEFT, MIDDLE = 84, 340, 60, 600


def draw(result: Mapping[str, Any]) -> str:
    """The picture. Memory is in units of the fullest device of 1F1B."""
    families = result["families"]
    whole = max(families["1f1b"]["measured_bytes"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
        text(20, 30, "Peak activation memory, measured in real runs", 'font-weight="600" font-size="15"'),
        text(
            20,
            50,
            f"{result['devices']} devices, {result['microbatches']} microbatches; 1 is the fullest device of 1F1B; "
            "black lines: simulated",
            f'font-size="12" fill="{SOFT}"',
        ),
        *devices(result, whole),
        *overview(families, whole),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def devices(result: Mapping[str, Any], whole: float) -> Iterator[str]:
    """Left: one group of bars a device."""
    shown = [name for name in NAMES if name in result["families"]]
    count, right = result["devices"], MIDDLE - 40
    step = (right - LEFT) / count
    width = 0.8 * step / len(shown)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = height(share)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>'
        yield text(LEFT - 8, y + 4, f"{share:g}", f'text-anchor="end" font-size="12" fill="{SOFT}"')
    for place, name in enumerate(shown):
        case = result["families"][name]
        for device in range(count):
            x = LEFT + step * (device + 0.1) + place * width
            y = height(case["measured_bytes"][device] / whole)
            yield bar(x, y, width - 1, FOOT - y, COLOURS[name])
            y = height(case["simulated_bytes"][device] / whole)
            yield f'<path d="M{x - 1:.1f} {y:.1f}h{width + 1:.1f}" stroke="#000000" stroke-width="1.6"/>'
        yield bar(LEFT + 96 * place, FOOT + 34, 12, 12, COLOURS[name])
        yield text(LEFT + 96 * place + 18, FOOT + 45, NAMES[name], f'fill="{INK}"')
    for device in range(count):
        x = LEFT + step * (device + 0.5)
        yield text(x, FOOT + 18, str(device), f'text-anchor="middle" font-size="12" fill="{SOFT}"')
    yield text(right, FOOT + 45, "device", f'text-anchor="end" font-size="12" fill="{SOFT}"')


def overview(families: Mapping[str, Any], whole: float) -> Iterator[str]:
    """Right: the fullest device of every family."""
    label, left, right = MIDDLE + 120, MIDDLE + 128, WIDTH - 60
    most = max(max(case["measured_bytes"]) for case in families.values()) / whole
    step = (FOOT - TOP) / len(families)
    yield text(MIDDLE, TOP - 12, "fullest device of every family", f'font-size="12" fill="{SOFT}"')
    for place, (name, case) in enumerate(sorted(families.items(), key=lambda item: item[1]["share_of_1f1b"])):
        y = TOP + place * step
        share = case["share_of_1f1b"]
        long = (right - left) * share / most
        colour = COLOURS.get(name, "#c9d3dd")
        yield text(label, y + step / 2 + 4, name, f'text-anchor="end" font-size="12" fill="{INK}"')
        yield bar(left, y + 3, long, step - 6, colour)
        yield text(left + long + 6, y + step / 2 + 4, f"{share:.2f}", f'font-size="12" fill="{INK}"')


def height(share: float) -> float:
    """The y of a share of 1F1B's memory; a little room above 1."""
    return FOOT - (FOOT - TOP) * share / 1.08


def bar(x: float, y: float, width: float, tall: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}" fill="{colour}"/>'


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'
