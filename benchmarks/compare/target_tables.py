"""The tables of `benchmarks target`, in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_dsgd.lab.target_rows import BASELINE, SHARES, Row


def tables(result: dict[str, Any]) -> str:
    """Returns when training ends, seconds to each share of the quality, then quality and speed."""
    settings = result.get("settings", {})
    base = settings.get("baseline", BASELINE)
    epochs = "one endless epoch"
    if settings.get("epoch_steps"):
        epochs = f"epochs of {settings['epoch_steps']} steps, with a validation after each"
    parts = []
    if "end" in result["summary"][0]:  # not in older files
        parts += [
            f"Training: {epochs}.  Seconds until it ends, and share of {base}'s [95% interval]:",
            end_table(result),
        ]
    for share in SHARES:
        words = "all" if share == 1 else f"{share:.0%}"
        parts.append(f"Seconds to {words} of {base}'s final quality, and share of its time:")
        parts.append(time_table(result, f"{share:g}"))
        if any("at_baseline_lr" in row for row in result["summary"]):
            parts.append(f"The same with {base}'s own learning rate:")
            parts.append(default_table(result, f"{share:g}"))
    better = "accuracy in points" if result["higher_is_better"] else "loss"
    rates = "steps/s of the job"
    if not result["summary"][0].get("job_steps_per_s"):  # an older file
        rates = "steps/s (mean of ranks)"
        if any(row.get("slowest_steps_per_s") for row in result["summary"]):
            rates += ", steps/s (slowest rank)"
    parts.append(f"Final {better} relative to {base}; {rates}; learning rate:")
    parts.append(quality_table(result))
    return "\n\n".join(parts)


def end_table(result: dict[str, Any]) -> str:
    """Returns when training ends, below the least time in which it could."""
    text = _table(result, _end_cell)
    floors = result.get("floors", {})
    if not floors:
        return text
    head, rule, *rows = text.splitlines()
    names = [name.strip() for name in head.strip("| ").split("|")]
    base = {
        row["situation"]: row["end"]["seconds"]
        for row in result["summary"]
        if row["strategy"] == result["settings"]["baseline"]
    }
    cells = [f"{floors[name]:.0f} s ({floors[name] / base[name]:.2f})" for name in names]
    return "\n".join([head, rule, "| floor: nobody waits | " + " | ".join(cells) + " |", *rows])


def time_table(result: dict[str, Any], share: str) -> str:
    """Returns seconds to this share of the baseline's final quality."""
    return _table(result, lambda row: _time_cell(row, row["to_target"][share]))


def default_table(result: dict[str, Any], share: str) -> str:
    """Returns the same, where each strategy has the baseline's learning rate."""

    def cell(row: Row) -> str:
        alike = row.get("at_baseline_lr")
        return "" if alike is None else _time_cell(row, alike["to_target"][share])

    return _table(result, cell)


def quality_table(result: dict[str, Any]) -> str:
    """Returns final quality, the job's rate, and learning rate; of older files, ranks' rates."""
    base = result.get("settings", {}).get("baseline", BASELINE)
    higher_is_better = result["higher_is_better"]
    return _table(result, partial(_quality_cell, base=base, higher_is_better=higher_is_better))


def _table(result: dict[str, Any], text: Callable[[Row], str]) -> str:
    by_place = {(row["strategy"], row["situation"]): row for row in result["summary"]}
    situations = list(dict.fromkeys(row["situation"] for row in result["summary"]))
    lines = ["| | " + " | ".join(situations) + " |", "|---" * (len(situations) + 1) + "|"]
    for spec in dict.fromkeys(row["strategy"] for row in result["summary"]):
        found = [by_place.get((spec, situation)) for situation in situations]
        texts = ["" if row is None else text(row) for row in found]
        name, comma, data = spec.partition(", ")
        lines.append(f"| `{name}`{comma}{data} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _share(figures: Row) -> str:
    text = f"{figures['share']:.2f}"
    if "interval" in figures and figures["interval"][0] != figures["interval"][1]:
        text += " [{:.2f}, {:.2f}]".format(*figures["interval"])
    return text


def _end_cell(row: Row) -> str:
    return f"{row['end']['seconds']:.0f} s ({_share(row['end'])})"


def _time_cell(row: Row, figures: Row) -> str:
    count = f"{figures['reached']} of {row['seeds']}"
    if figures["seconds"] is None or not figures["reached"]:
        return f"never ({count})" if figures["reached"] else "never"
    text = f"{figures['seconds']:.0f} s ({_share(figures)})"
    if "stretch" in figures:
        text += f", {figures['stretch']:g}x"
    return text if figures["reached"] == row["seeds"] else f"{text}, {count}"


def _quality_cell(row: Row, *, base: str, higher_is_better: bool) -> str:
    if row["strategy"] == base:
        value = f"{100 * row['value']:.1f}%" if higher_is_better else f"{row['value']:.3f}"
    else:
        value = (
            f"{100 * row['difference']:+.1f}" if higher_is_better else f"{row['difference']:+.3f}"
        )
    rates = [row.get("job_steps_per_s")]
    if rates[0] is None:
        rates = [row["steps_per_s"], row.get("slowest_steps_per_s")]
    text = ", ".join(f"{rate:.2f}" for rate in rates if rate is not None)
    return f"{value}; {text}; {row['lr']:g}{'*' * row['lr_at_edge']}"
