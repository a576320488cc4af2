"""Line charts as SVG, written here: a plotting library would be the heaviest dependency of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 34, 44
_COLOURS = ("#2476a8", "#c2730a", "#2c7a4b", "#7a5fb0", "#a3261b", "#56625d")
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#56625d}.t{font-weight:600;font-size:13px;fill:#1b2421}"
    ".g{stroke:#d9dedb}.b{fill:#fff}@media(prefers-color-scheme:dark){.b{fill:#182025}text{fill:#9fafae}"
    ".t{fill:#e4eae8}.g{stroke:#303c43}}"
)


@dataclass(frozen=True)
class Chart:
    """Lines by name over one pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    y_most: float | None = None  # None: what the points reach


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution: (value, part of all up to it)."""
    ordered = sorted(values)
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def write_svg(path: str | Path, charts: Sequence[Chart]) -> None:
    """The charts side by side; OSError as `open`."""
    width = _WIDTH * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}">',
        f'<style>{_STYLE}</style><rect class="b" width="{width}" height="{_HEIGHT}"/>',
    ]
    for place, chart in enumerate(charts):
        parts.append(f'<g transform="translate({place * _WIDTH},0)">{"".join(_chart(chart))}</g>')
    Path(path).write_text("".join(parts) + "</svg>\n", encoding="utf-8")


def _chart(chart: Chart) -> list[str]:
    points = [point for line in chart.lines.values() for point in line if all(map(math.isfinite, point))]
    x_most = _nice(max((x for x, _ in points), default=1.0))
    y_most = chart.y_most or _nice(max((y for _, y in points), default=1.0))

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, x / x_most)
        return across, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, y / y_most)

    made = [f'<text class="t" x="{_LEFT}" y="18">{escape(chart.title)}</text>']
    for step in range(5):
        share = step / 4
        x, y = place(x_most * share, y_most * share)
        made.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        made.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_most * share:g}</text>')
        made.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{x_most * share:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    made.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    made.append(
        f'<text transform="translate(12,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'
    )
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line if all(map(math.isfinite, p))))
        made.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>')
        y = _HEIGHT - _BOTTOM - 8 - 14 * (len(chart.lines) - 1 - number)
        made.append(
            f'<text x="{_WIDTH - _RIGHT - 4}" y="{y}" text-anchor="end" style="fill:{colour}">{escape(name)}</text>'
        )
    return made


def _nice(value: float) -> float:
    """The next number that is easily read."""
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 4.0, 5.0, 8.0, 10.0) if step * power >= value * 0.999999)
