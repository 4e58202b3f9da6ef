"""A ranking as a table, and one sentence of advice with what to paste."""

from __future__ import annotations

import textwrap
from typing import Any, Final

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab import decisions, epochs
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, Candidate
from lightning_dsgd.lab.advise.ranking import CLOSE, Ranking, Row
from lightning_dsgd.lab.epochs import CLAIMED
from lightning_dsgd.lab.simulate.recorded import Recorded

COLUMNS: Final = (
    ("", "training ends,", "steps/s", "", "", "accuracy,", "99% of it,"),
    ("strategy", "share of time", "of the job", "MB sent", "MB memory", "points", "share of time"),
)

WIDTH: Final = 110
MOST_ROWS: Final = 24
"""A table with more rows is cut."""
FIRST_ROWS: Final = 12
"""The rows at its head that it keeps then."""


def setting(epoch_steps: int | None, num_steps: int, recorded: Recorded | None) -> str:
    """Says how long an epoch is, who says so, and how much of it is simulated.

    Args:
        epoch_steps: the steps of an epoch; None: one endless epoch
        num_steps: the steps that are simulated
        recorded: the trace that says so; None: the user does
    """
    if epoch_steps is None:
        return (
            epochs.in_words(None) + "  Claimed batches gain nothing there:\nif your training has "
            "epochs, say how long one is, as in --epoch-steps 500."
        )
    said = [epochs.in_words(epoch_steps)]
    if recorded is not None:
        said.append(
            f"So many samples has an epoch of the trace: {recorded.epoch_steps} steps of "
            f"{recorded.num_ranks} ranks."
        )
    if num_steps < epoch_steps:
        said.append(f"Simulated: {num_steps} of the steps of an epoch (--steps).")
    said.append('In rows with "claimed" ranks take them one by one: data="claimed".')
    return "\n".join(said)


def table(ranking: Ranking) -> str:
    """Returns one line for each candidate, what ends soonest first.

    Of many, those whose accuracy was not measured are left out, but for the soonest.
    """
    rows = ranking.rows
    if len(rows) > MOST_ROWS:
        kept = {row.label for row in rows[:FIRST_ROWS]}
        rows = [r for r in rows if r.cost or r.candidate.spec == BOUND or r.label in kept]
    lines = [*COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(len(COLUMNS), "  ".join("-" * width for width in widths))
    if len(rows) < len(ranking.rows):
        text.append(
            f"... and {len(ranking.rows) - len(rows)} later ones whose accuracy was not measured: "
            "see --output"
        )
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    cost = row.cost
    points = time = "?"
    if row.candidate.spec == BOUND:
        points = time = "-"
    elif cost is not None:
        points = "" if row.label == BASELINE else f"{cost.points:+.1f}"
        time = f"{cost.time:.2f}" if cost.reached else "never"
        if 0 < cost.reached < cost.seeds:
            time += f", {cost.reached} of {cost.seeds}"
    return (
        row.label,
        f"{row.end_share:.2f}",
        f"{row.job_steps_per_s:.3g}",
        f"{row.mb_sent:.3g}",
        f"{row.mb_memory:.3g}",
        points,
        time,
    )


def legend(ranking: Ranking) -> str:
    """Says what the columns mean."""
    return _filled(
        "training ends: the time until all ranks are done, without validation, over all-reduce's "
        f"({BASELINE}).  {BOUND} never communicates: nothing ends clearly sooner.  steps/s of the "
        "job: as many batches as there are ranks, on whichever rank.  MB sent: by a rank in a "
        "step.  MB memory: what a rank needs more at its peak, with weights in fp32.  accuracy: "
        "points against all-reduce at the end.  99% of it: the time to 99% of all-reduce's "
        'accuracy over its own; "6 of 10": so many seeds reached it, the others count as the time '
        "limit.  Both "
        f"were measured {accuracy.in_words(ranking.situation)}; "
        '"?": not measured.'
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def advice(ranking: Ranking) -> str:
    """Says what to use, with a line of code and of YAML, and what helps against a slow rank."""
    parts = [_choice(ranking), _own_rate(ranking), _sooner(ranking), _against_a_slow_rank(ranking)]
    return "\n".join(part for part in parts if part)


def _choice(ranking: Ranking) -> str:
    row = ranking.advised
    if not row.is_strategy:
        said = (
            "Advice: stay with all-reduce (or Lightning's ddp).  With no strategy that was as good "
            f"where accuracy was measured does training end more than {CLOSE:.0%} sooner here."
        )
    else:
        assert row.cost is not None
        points = f"{abs(row.cost.points):.1f}"
        end = f"{points} points {'below' if row.cost.points < 0 else 'above'} it"
        end = "as high" if points == "0.0" else end
        said = (
            f"Advice: {row.label}.  Training ends after {row.end_share:.2f} of all-reduce's time.  "
            "In the most similar case that was measured it reached 99% of all-reduce's accuracy in "
            f"{row.cost.time:.2f} of its time, and ended {end}." + _of_all_reduce(ranking)
        )
        whys = (c.why for c in ranking.decided.choices if ranking.row_of(c, [row]))
        said += "".join(f"  {why}" for why in whys)
    return _filled(said) + "\n" + paste(row.candidate)


def _of_all_reduce(ranking: Ranking) -> str:
    """Says how soon all-reduce in another setting ends; empty where none ends clearly sooner."""
    settings = (row for row in ranking.rows if row.candidate.name == BASELINE and row.is_strategy)
    row = next(settings, None)
    if row is None or row is ranking.advised or row.end_share > 1 - CLOSE:
        return ""
    return f"  All-reduce too can end sooner: {row.label} after {row.end_share:.2f} of that time."


def _own_rate(ranking: Ranking) -> str:
    """Names what keeps DDP's learning rate; empty where that is advised, or nothing sooner does."""
    choice = ranking.decided.choice(decisions.OWN_RATE)
    found = ranking.row_of(choice, ranking.rows) if choice else None
    if found is None or found.end_share > 1 - CLOSE or found is ranking.advised:
        return ""
    return f"To keep DDP's learning rate: {found.label}, after {found.end_share:.2f}.\n" + paste(
        found.candidate
    )


def _sooner(ranking: Ranking) -> str:
    """Names what ends sooner than what is advised, and was not as good; empty if nothing does."""
    row = ranking.sooner
    if row is None or row.cost is None:
        return ""
    late = f"only after {row.cost.time:.2f} of its time"
    if 2 * row.cost.reached <= row.cost.seeds:
        late = f"with only {row.cost.reached} of {row.cost.seeds} seeds"
    return (
        f"{row.label} ends sooner, after {row.end_share:.2f}, but reached 99% of all-reduce's "
        f"accuracy\n{late}."
    )


def _against_a_slow_rank(ranking: Ranking) -> str:
    """Says what claims gain where a rank is always slower; empty if none is."""
    if not ranking.slow_ranks:
        return ""
    ranks = ", ".join(f"rank {rank} has {speed:.0%}" for rank, speed in ranking.slow_ranks.items())
    said = (
        "A rank that is always slower holds up the end of every epoch where each rank owes as many "
        f"batches.  As recorded, {ranks} of the mean speed."
    )
    where = (
        "  Where claims are refused (docs/claimed_batches.md says where) deal the batches by speed "
        "(docs/choosing.md says how)."
    )
    row, code = ranking.claims, ""
    if ranking.advised.candidate.data == CLAIMED:
        said += "  With claimed batches it makes as many as it can." + where
    elif row is not None:
        known = ", though it was not as good where accuracy was measured"
        if row.cost is None:
            known = "; accuracy was not measured in such a case"
        said += f"  {row.label}: training ends after {row.end_share:.2f} of all-reduce's time"
        said += ("" if row.is_as_good else known) + "." + where
        code = "\n" + paste(row.candidate)
    elif ranking.epoch_steps is None:
        said += "  In epochs ranks can claim their batches instead: try --epoch-steps 500."
    else:
        said += "  These strategies cannot claim batches, as their ranks step together."
    return "\n" + _filled(said) + code


def paste(candidate: Candidate) -> str:
    """Returns code and YAML that choose this strategy."""
    name, options = decisions.options(candidate.spec, candidate.data)
    yaml = f"trainer: {{strategy: {name}}}"
    if options:
        listed = ", ".join(f"{key}: {_yaml(value)}" for key, value in options.items())
        path = f"lightning_dsgd.{ALGORITHMS[name].__name__}Strategy"
        yaml = f"trainer: {{strategy: {{class_path: {path}, init_args: {{{listed}}}}}}}"
    code = decisions.code(candidate.spec, candidate.data)
    return f"    L.Trainer(strategy={code}, ...)\n    {yaml}"


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
