"""A ranking as a table, and one sentence of advice with what to paste."""

from __future__ import annotations

from typing import Any, Final

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND
from lightning_dsgd.lab.advise.ranking import CLOSE, Ranking, Row

COLUMNS: Final = (
    ("", "slowest", "", "slowest", "mean", "", "", "", "99% in an"),
    ("strategy", "steps/s", "of bound", "x allreduce", "x allreduce", "MB sent", "MB memory",
     "accuracy", "endless epoch"),
)  # fmt: skip


def table(ranking: Ranking) -> str:
    """Returns one line for each candidate, the fastest first."""
    lines = [*COLUMNS, *map(_cells, ranking.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(len(COLUMNS), "  ".join("-" * width for width in widths))
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    cost = row.cost
    points = time = "?"
    if row.candidate.spec == BOUND:
        points = time = "-"
    elif cost is not None:
        points = "" if row.candidate.spec == BASELINE else f"{cost.points:+.1f}"
        time = "never" if cost.time is None else f"{cost.time:.2f}"
    return (
        row.candidate.spec,
        f"{row.slowest_steps_per_s:.3g}",
        f"{row.share:.0%}",
        f"{row.slowest_ratio:.2f}",
        f"{row.mean_ratio:.2f}",
        f"{row.mb_sent:.3g}",
        f"{row.mb_memory:.0f}",
        points,
        time,
    )


def legend(ranking: Ranking) -> str:
    """Says what the columns mean."""
    return (
        "slowest, mean: steps per second of the slowest rank, and the mean of the ranks.  Where "
        "ranks owe as many batches,\ntraining ends with the slowest.  of bound: of the slowest "
        f"rank's without communication ({BOUND}).  MB sent: by a rank\nin a step.  MB memory: "
        "what a rank needs more at its peak, with weights in fp32.  accuracy: points against "
        "all-reduce\nat the end.  99%: the time to 99% of its accuracy over its own.  Both were "
        "measured on a small task in one endless\nepoch, where "
        f"{accuracy.in_words(ranking.situation)}; "
        '"never": half of the seeds did not reach it; "?": not measured.'
    )


def advice(ranking: Ranking) -> str:
    """Says what to use, with a line of code and of YAML, and what helps against a slow rank."""
    return _choice(ranking) + _dealing(ranking)


def _choice(ranking: Ranking) -> str:
    row = ranking.advised
    spec = row.candidate.spec
    if spec == BASELINE or row.slowest_ratio < 1 + CLOSE:
        return (
            "Advice: stay with all-reduce (or Lightning's ddp): no strategy whose accuracy was "
            f"measured is predicted to be more than {CLOSE:.0%} faster here.\n" + paste(BASELINE)
        )
    assert row.cost is not None
    said = f"it ended {abs(row.cost.points):.1f} points "
    said += "below" if row.cost.points < 0 else "above"
    after = "never reached 99% of its accuracy with half of the seeds"
    if row.cost.time is not None:
        after = f"reached 99% of its accuracy in {row.cost.time:.2f} of its time"
    return (
        f"Advice: {spec}, {row.slowest_ratio:.2f} times as fast as all-reduce until the slowest "
        f"rank is done, and {row.share:.0%} of the bound; in the most\nsimilar case that was "
        f"measured, a small task in one endless epoch, {said} all-reduce and\n{after}.\n"
        + paste(spec)
        + _reaching(ranking, row)
    )


def _dealing(ranking: Ranking) -> str:
    """Says what is gained where slow ranks get fewer batches; empty if no rank is always slower."""
    if not ranking.slow_ranks:
        return ""
    ranks = ", ".join(f"rank {rank} {speed:.0%}" for rank, speed in ranking.slow_ranks.items())
    spec = ranking.advised_if_dealt.candidate.spec
    return (
        "\nA rank that is always slower holds up the end of every epoch, whatever the strategy.  "
        f"Deal the batches by speed:\nrecorded {ranks} of an equal share.  Then {spec} needs at "
        f"least {ranking.dealt_by_speed:.2f} of the time of all-reduce with equal shares\n"
        '(how: docs/choosing.md, "A rank that is always slower").'
    )


def _reaching(ranking: Ranking, advised: Row) -> str:
    """Names the fastest strategy that was as good in the end, where the advised one was not."""
    if advised.cost is not None and advised.cost.time is not None:
        return ""
    for row in ranking.rows:  # the fastest first
        if row.cost is not None and row.cost.time is not None and row.candidate.spec != BOUND:
            spec = row.candidate.spec
            rate = f"{row.slowest_ratio:.2f} times as fast as all-reduce"
            return f"\nThe fastest that reached 99% there: {spec}, {rate}.\n{paste(spec)}"
    return ""


def paste(spec: str) -> str:
    """Returns code and YAML that choose this strategy."""
    name, options = parse(spec)
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    code = f'strategy="{name}"'
    if options:
        code = f"strategy=lightning_dsgd.{ALGORITHMS[name].__name__}Strategy({arguments})"
    yaml = f"trainer: {{strategy: {name}}}"
    if options:
        listed = ", ".join(f"{key}: {_yaml(value)}" for key, value in options.items())
        path = f"lightning_dsgd.{ALGORITHMS[name].__name__}Strategy"
        yaml = f"trainer: {{strategy: {{class_path: {path}, init_args: {{{listed}}}}}}}"
    return f"    L.Trainer({code}, ...)\n    {yaml}"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def warnings(num_ranks: int, probed: int, recorded: int, has_nodes: bool) -> list[str]:
    """Says where the prediction goes beyond what was measured."""
    said = []
    if num_ranks > probed:
        said.append(
            f"{num_ranks} ranks are more than the {probed} that were probed: further nodes are "
            "taken to be like these, and the network between them not to be a limit"
        )
        if not has_nodes:
            said.append(
                "only ranks of one node were probed: links between nodes are taken to be as fast "
                "as those inside; probe two nodes"
            )
    if num_ranks > recorded:
        said.append(
            f"{num_ranks} ranks are more than the {recorded} that were recorded: the others are "
            "copies of these at other times"
        )
    return [f"extrapolated: {text}" for text in said]
