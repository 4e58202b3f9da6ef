"""Lines over an axis, named where they end, and dots with intervals: parts of a picture."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_dsgd.lab.drawing.picture import nice_step
from lightning_dsgd.lab.drawing.style import INK, Picture, colour, spread, width_of

_LEFT: Final = 46
_DASHED: Final = 'stroke-width="2.2" stroke-dasharray="2 5"'


@dataclass(frozen=True)
class Series:
    """Holds a line, and where its seeds lie.

    Args:
        spec: the strategy, which has a colour
        name: what stands beside its end
        xs: the points' places
        ys: their means
        low: the lowest of the seeds; empty: no band
        high: the highest
        dashed: whether the line is dashed
    """

    spec: str
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


def mean_of(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], points: int = 60
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns places, and there the mean, least and largest of curves with places of their own."""
    end = statistics.mean(xs[-1] for xs, _ in curves)
    begin = max(xs[0] for xs, _ in curves)
    at = [begin + (end - begin) * k / (points - 1) for k in range(points)]
    columns = [[_at(xs, ys, x) for xs, ys in curves] for x in at]
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    return at, [statistics.mean(c) for c in columns], low, high


def _at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left = right - 1
    share = (x - xs[left]) / (xs[right] - xs[left]) if xs[right] > xs[left] else 0.0
    return ys[left] + min(1.0, max(0.0, share)) * (ys[right] - ys[left])


def lines(
    picture: Picture,
    title: str,
    series: Sequence[Series],
    height: float,
    y_range: tuple[float, float],
    say_y: Callable[[float], str],
    x_words: str,
    target: tuple[float, str] | None = None,
) -> None:
    """Draws one panel at the lower end of a picture.

    Args:
        picture: the picture
        title: what the panel shows, in a sentence
        series: the lines
        height: the height between the axes
        y_range: what the vertical axis shows
        say_y: names a height
        x_words: what the horizontal axis shows
        target: a height that a line marks, and its name
    """
    picture.paragraph(title, "b")
    top, left = picture.height + 8, _LEFT
    names = max(width_of(each.name, 13, "b") for each in series)
    right = picture.width - 26 - names
    low, high = y_range
    until = max(each.xs[-1] for each in series)

    def x(at: float) -> float:
        return left + at / until * (right - left)

    def y(at: float) -> float:
        return top + (high - min(max(at, low), high)) / (high - low) * height

    step = nice_step(high - low, 4)
    mark = math.ceil(low / step - 1e-9) * step
    while mark <= high + 1e-9:
        picture.path(f"M{left} {y(mark):.1f}H{right:.1f}", "g")
        picture.text(left - 6, y(mark) + 4, say_y(mark), "a e")
        mark += step
    step = nice_step(until, 5)
    for k in range(int(until / step + 1e-9) + 1):
        word = f"{k * step:g}" + (f" {x_words}" if k == 0 else "")
        if not 0 < x(k * step) - left < width_of(f"0 {x_words}", 12) + 14:  # else in its way
            picture.text(x(k * step), top + height + 16, word, "a" if k == 0 else "a m")
    if target:
        picture.path(f"M{left} {y(target[0]):.1f}H{right:.1f}", "s" + picture.of(INK), _THIN)
        picture.text(left + 4, y(target[0]) - 4, target[1], "a")
    for each in series:
        if each.low:
            below, above = ([y(v) for v in of] for of in (each.low, each.high))
            picture.band([x(v) for v in each.xs], below, above, colour(each.spec))
        shown = [(x(a), y(b)) for a, b in zip(each.xs, each.ys, strict=True) if b >= low]
        picture.line(shown, colour(each.spec), _DASHED if each.dashed else "")
    ends = spread([y(each.ys[-1]) for each in series], 16, top + 4, top + height)
    for each, at in zip(series, ends, strict=True):
        picture.text(right + 8, at + 4, each.name, "b", picture.of(colour(each.spec)))
    picture.height = top + height + 26


_THIN: Final = 'stroke-width="1" stroke-dasharray="3 4"'


@dataclass(frozen=True)
class Dots:
    """Holds a row of a dot plot.

    Args:
        spec: the strategy, which has a colour
        name: what stands before the row
        share: the filled dot
        interval: a line through it
        other: a hollow dot, if any
        note: what stands at the row's end
    """

    spec: str
    name: str
    share: float
    interval: tuple[float, float]
    other: float | None = None
    note: str = ""


def dots(
    picture: Picture, title: str, rows: Sequence[Dots], left: float, until: float, words: str
) -> None:
    """Draws one panel of dots, with a line at 1."""
    picture.paragraph(title, "b")
    top, gap = picture.height + 6, 21
    right = picture.width - 66
    bottom = top + gap * len(rows)

    def x(at: float) -> float:
        return left + min(at, until) / until * (right - left)

    for k in range(int(until / 0.25 + 1e-9) + 1):
        at = 0.25 * k
        style = "s" + picture.of(INK) if at == 1 else "g"
        picture.path(f"M{x(at):.1f} {top:.1f}V{bottom:.1f}", style)
        picture.text(x(at), bottom + 15, f"{at:g}" if at < until else words, "a m")
    for place, row in enumerate(rows):
        y = top + gap * (place + 0.5)
        picture.text(left - 8, y + 4.5, row.name, "e")
        low, high = row.interval
        picture.line([(x(low), y), (x(high), y)], colour(row.spec))
        if row.other is not None:
            picture.dot(x(row.other), y, colour(row.spec), hollow=True)
        picture.dot(x(row.share), y, colour(row.spec))
        picture.text(right + 10, y + 4.5, row.note, "a")
    picture.height = bottom + 24
