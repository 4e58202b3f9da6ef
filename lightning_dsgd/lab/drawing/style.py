"""How every picture looks: one colour for each strategy, light and dark, and the parts of an SVG.

A picture is as wide as a phone shows it without making its letters too small, says its message in
its title, and names its lines where they end.  Colours are told apart by the colour-blind.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Final

WIDTH: Final = 480
INK: Final = ("#24292f", "#e6edf3")
FAINT: Final = ("#57606a", "#9198a1")
LINE: Final = ("#d0d7de", "#30363d")
BACK: Final = ("#ffffff", "#0d1117")
CARD: Final = ("#eef2f6", "#1c232c")
"""Each for a light page and for a dark one."""
COLOURS: Final = {
    "ddp": INK,
    "allreduce": INK,
    "balanced": ("#4b8b00", "#8fd14f"),
    "wagma": ("#0072b2", "#58b4ee"),
    "popsgd": ("#009e73", "#31c99d"),
    "hpsgd": ("#d55e00", "#ff8b42"),
    "adpsgd": ("#cc79a7", "#e6a1c7"),
    "local_sgd": ("#b8860b", "#e6b422"),
    "sgp": ("#7a52c7", "#ab8df0"),
    "oktopk": ("#8b1a6b", "#dd6fbc"),
    "eager_sgd": ("#7d5a3c", "#c29b79"),
    "ddp_bf16": ("#6e7781", "#afb8c1"),
    "ddp_powersgd": ("#6e7781", "#afb8c1"),
}
"""The colours of strategies, after Okabe and Ito; all-reduce has the colour of the letters."""
OTHER: Final = ("#6e7781", "#afb8c1")
SPANS: Final = {
    "compute": ("#a6cee9", "#2b5d80"),
    "late wait": ("#d55e00", "#ff7b29"),
    "wait": ("#f0b04c", "#d9992f"),
    "exchange": ("#0072b2", "#58b4ee"),
    "fetch": ("#f0e442", "#d8cc2e"),
    "evaluate": ("#b3b3b3", "#7d7d7d"),
    "serve": ("#009e73", "#31c99d"),
    "late": ("#8b1a6b", "#dd6fbc"),
}
"""The colours of what a rank does in a timeline: computing is pale, as a rank should compute."""
_LETTER, _BOLD = 0.53, 0.62
"""A letter's mean width in a wide font, as a share of its height."""


def colour(spec: str) -> tuple[str, str]:
    """Returns the colours of a strategy, with any settings."""
    return COLOURS.get(spec.partition(":")[0].partition(",")[0], OTHER)


def width_of(text: str, size: float, style: str = "") -> float:
    """Returns about how wide a text is."""
    return (_BOLD if style in ("t", "b") else _LETTER) * size * len(text)


class Picture:
    """An SVG that grows downwards, with a sentence as its title.

    Args:
        title: the message of the picture
        note: what was measured, below the title
        width: the width
    """

    def __init__(self, title: str, note: str = "", width: int = WIDTH) -> None:
        self.title, self.width = title, width
        self.height = 14.0
        self.parts: list[str] = []
        self._colours: dict[tuple[str, str], str] = {}
        for text, style, size in ((title, "t", 16), (note, "n", 12.5)):
            self.paragraph(text, style, size)
        self.height += 8

    def paragraph(self, text: str, style: str = "", size: float = 13.0) -> None:
        """Writes lines across the picture at its lower end."""
        for line in textwrap.wrap(text, int((self.width - 24) / width_of("x", size, style))):
            self.height += round(1.28 * size)
            self.text(12, self.height - 4, line, style)

    def text(self, x: float, y: float, text: str, style: str = "", fill: str = "") -> None:
        """Writes one line.

        Args:
            x: where it begins; with "e" where it ends, with "m" its middle
            y: the line it stands on
            text: the line
            style: "t" title, "n" note, "b" bold, "e" ends there, "m" in the middle
            fill: a class of `of`; by default the colour of the letters
        """
        names = " ".join(each for each in (style, fill) if each)
        of_class = f' class="{names}"' if names else ""
        self.parts.append(f'<text x="{x:.5g}" y="{y:.5g}"{of_class}>{escape(text)}</text>')

    def of(self, colours: tuple[str, str]) -> str:
        """Returns the class that fills with a colour; with "s" before it, it draws a line."""
        return self._colours.setdefault(colours, f"c{len(self._colours)}")

    def path(self, d: str, style: str, more: str = "") -> None:
        """Draws a path."""
        self.parts.append(f'<path class="{style}" d="{d}"{" " + more if more else ""}/>')

    def line(
        self, points: Sequence[tuple[float, float]], colours: tuple[str, str], more: str = ""
    ) -> None:
        """Draws a line through points."""
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.path(d, "s" + self.of(colours), more or 'stroke-width="2.2"')

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], c: tuple[str, str]
    ) -> None:
        """Fills what lies between two lines."""
        there = [f"{x:.1f} {y:.1f}" for x, y in zip(xs, high, strict=True)]
        back = [f"{x:.1f} {y:.1f}" for x, y in zip(xs, low, strict=True)][::-1]
        self.path("M" + "L".join(there + back) + "Z", self.of(c), 'opacity="0.16"')

    def dot(self, x: float, y: float, colours: tuple[str, str], *, hollow: bool = False) -> None:
        """Draws a dot."""
        name = f'"s{self.of(colours)} h" stroke-width="2"' if hollow else f'"{self.of(colours)}"'
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" class={name}/>')

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", style: str = "k"
    ) -> None:
        """Draws a rounded box, with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'class="{style}"/>'
        )
        lines = text.split("\n") if text else []
        for place, each in enumerate(lines):
            at = y + height / 2 + 4.5 + 16 * (place - (len(lines) - 1) / 2)
            self.text(x + width / 2, at, each.removeprefix("*"), "m b" if each[:1] == "*" else "m")

    def svg(self) -> str:
        """Returns the picture."""
        rules: list[str] = []
        dark: list[str] = []
        fixed = {"text": INK, ".n,.a": FAINT}
        for name, colours in fixed.items():
            for place, into in enumerate((rules, dark)):
                into.append(f"{name}{{fill:{colours[place]}}}")
        shapes = {".bg": BACK, ".k": CARD, ".h": BACK}
        for name, colours in (shapes | {f".{n}": c for c, n in self._colours.items()}).items():
            for place, into in enumerate((rules, dark)):
                into.append(f"{name}{{fill:{colours[place]}}}")
        lines = {f".s{name}": colours for colours, name in self._colours.items()}
        for name, colours in ({".g": LINE, ".k": LINE} | lines).items():
            for place, into in enumerate((rules, dark)):
                into.append(f"{name}{{stroke:{colours[place]}}}")
        style = (
            "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
            ".t{font-size:16px;font-weight:600}.n{font-size:12.5px}.b{font-weight:600}"
            ".a{font-size:12px}.e{text-anchor:end}.m{text-anchor:middle}"
            "path{stroke-linejoin:round;stroke-linecap:round}"
            + "".join(f"path{name}{{fill:none}}" for name in [*lines, ".g"])
        )
        height = round(self.height + 12)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'width="{self.width}" height="{height}" role="img" '
            f'aria-label="{escape(self.title)}">\n<style>{style}{"".join(rules)}'
            f"@media(prefers-color-scheme:dark){{{''.join(dark)}}}</style>\n"
            f'<rect width="100%" height="100%" rx="6" class="bg"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def spread(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Returns places near the wanted ones that are so far apart, between two bounds."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [min(max(wanted[i], low), high) for i in order]
    for _ in range(100):
        for a, b in pairwise(range(len(places))):
            short = apart - (places[b] - places[a])
            if short > 0:
                places[a], places[b] = places[a] - short / 2, places[b] + short / 2
        places = [min(max(place, low), high) for place in places]
    found = [0.0] * len(wanted)
    for place, i in zip(places, order, strict=True):
        found[i] = place
    return found
