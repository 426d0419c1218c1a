"""`distlab challenge`: time the learner's all-reduce against the built-in ones."""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from distlab.cli.learn import choose, impl_option, say, waiting
from distlab.grade import submission
from distlab.learner import folder
from distlab.util.text import counted

if TYPE_CHECKING:
    from distlab.races import Standings

SEEDS = 10_000
SHOWN_BESIDE = 5  # columns that fit on a line of 80 to 90 characters


def challenge(
    phase: Annotated[
        int | None, typer.Option(min=1, help="Whose open task.  [default: that of your next task]")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the clusters.  [default: a new one each time]"),
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, max=20, help="How many to draw.")] = 5,
    impl: Annotated[str, impl_option("Whose function to time.")] = "template",
) -> None:
    """Time your answer to the open task against the built-in ones, on randomly drawn clusters."""
    here = folder.find()
    chosen_phase = here.phase_of(choose(here, None)) if phase is None else here.course.phase(phase)
    task = chosen_phase.challenge
    if task is None:
        raise folder.LearnerError(f"phase {chosen_phase.number} has no open task")
    handed_in = submission.find(impl, here.root)
    chosen = random.randrange(SEEDS) if seed is None else seed
    drawn = counted(clusters, "cluster")
    with waiting(f"running {task.function} on {drawn} …"):
        from distlab import races

        try:
            tables = races.race(handed_in, task, chosen, clusters)
        except races.ChallengeError as error:
            raise folder.LearnerError(str(error)) from None
    say([f"{task.title} on {drawn}, ms; the same ones again: --seed {chosen}", ""])
    for table in tables:
        say([*_rows(table), *([""] if table.title else [])])
    if len(tables) > 1:
        against = f"the {tables[0].baseline}, whichever it was"
        say([f"On all: {races.figure(tables):.2f} times as fast as {against}."])


def _rows(standings: "Standings") -> Iterator[str]:
    """Yield the table in blocks of a few columns, with a row per algorithm, fastest first."""
    names = sorted(standings.seconds, key=standings.speedup, reverse=True)
    heads = standings.columns
    if standings.title:
        yield standings.title
    for first in range(0, len(heads), SHOWN_BESIDE):
        shown = slice(first, first + SHOWN_BESIDE)
        is_last = first + SHOWN_BESIDE >= len(heads)
        head = "".join(f"{text:>11}" for text in heads[shown])
        yield f"{'':20}{head}" + "   times as fast" * is_last
        for name in names:
            cells = "".join(f"{seconds * 1e3:>11.2f}" for seconds in standings.seconds[name][shown])
            mark = "  <" if name == "yours" else ""
            score = f"{standings.speedup(name):>16.2f}{mark}" if is_last else ""
            yield f"{name:20}{cells}{score}"
        if not is_last:
            yield ""
