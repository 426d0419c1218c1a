"""Draw the course in one picture: ``python scripts/course_map.py`` writes docs/images/course.svg.

The lessons come from course.toml.
"""

from dataclasses import dataclass
from pathlib import Path

from figures import NEEDLESS
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from distlab.course import Phase, load

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/course.svg"
WIDTH, HEIGHT = 100.0, 72.0  # size of the drawing, in arbitrary units
GAP = 1.6
INK, FAINT, PALE, LINE = "#22303c", "#5d6975", "#f4f5f7", "#7a8794"
PHASES = ("#d8e6f6", "#dcefdc", "#fbe7cf", "#f4dbe0")
LOOP = (  # the steps that a learner takes for each task
    ("read", "guidelines.md"),
    ("write", "the body of a function"),
    ("save", "distlab watch grades it"),
    ("understand", "which rank, which line, why"),
    ("go on", "or take one of three hints"),
)
WORLDS = (
    ("sim", "up to 1,024 virtual GPUs:\nexact bytes, virtual time,\ndeadlocks explained"),
    ("gloo", "real processes\non this computer\nor on several hosts"),
    ("nccl", "real processes,\na GPU for each"),
    ("mpi", "real processes,\nstarted by mpirun"),
)
TOGETHER = "put together:  make demo  ·  distlab train --impl mine  ·  the production trainer"
API = "torch.distributed and nothing else:  send, recv, all_reduce, new_group, group=…"


@dataclass(frozen=True)
class Box:
    """A rectangle of the drawing; x and y are its lower left corner."""

    x: float
    y: float
    width: float
    height: float

    def draw(self, axes: Axes, colour: str) -> None:
        """Draw the box with rounded corners."""
        corner = (self.x, self.y)
        style = "round,pad=0,rounding_size=0.8"
        look = {"boxstyle": style, "facecolor": colour, "edgecolor": LINE, "linewidth": 0.8}
        axes.add_patch(FancyBboxPatch(corner, self.width, self.height, **look))

    def head(self, axes: Axes, text: str, size: float = 10.5) -> None:
        """Write a bold line of text at the top edge."""
        place = self.x + self.width / 2, self.y + self.height - 1.9
        axes.text(*place, text, ha="center", va="center", size=size, weight="bold", color=INK)

    def body(self, axes: Axes, text: str, size: float = 8.5) -> None:
        """Write lines of text below the head."""
        place = self.x + self.width / 2, self.y + self.height - 3.4
        axes.text(*place, text, ha="center", va="top", size=size, color=INK, linespacing=1.5)


def columns(count: int, y: float, height: float) -> list[Box]:
    """Return ``count`` boxes side by side, across the whole width."""
    width = (WIDTH - GAP * (count - 1)) / count
    return [Box(k * (width + GAP), y, width, height) for k in range(count)]


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow between two points."""
    look = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look)


def draw_loop(axes: Axes) -> None:
    """Draw the steps that a learner takes for each task."""
    boxes = columns(len(LOOP), 65.6, 6.2)
    for box, (head, body) in zip(boxes, LOOP, strict=True):
        box.draw(axes, PALE)
        box.head(axes, head)
        box.body(axes, body)
        if box is not boxes[-1]:
            arrow(axes, (box.x + box.width, 68.7), (box.x + box.width + GAP, 68.7))


def draw_phase(axes: Axes, box: Box, phase: Phase, colour: str) -> None:
    """Draw a phase: the title and the file of each lesson, and the open task."""
    box.draw(axes, colour)
    box.head(axes, f"{phase.number}  {phase.title}")
    box.body(axes, f"{len(phase.tasks)} tasks, {phase.points} points")
    for number, lesson in enumerate(phase.lessons):
        draw_line(axes, box, 7.4 + 3.35 * number, lesson.title, f"{lesson.name}.py")
    if phase.challenge:
        draw_line(axes, box, 7.4 + 3.35 * len(phase.lessons), "An open task", phase.challenge.title)


def draw_line(axes: Axes, box: Box, below: float, text: str, remark: str) -> None:
    """Write a line ``below`` units below the top edge of a box, with a remark under it."""
    x, y = box.x + 1.2, box.y + box.height - below
    axes.text(x, y, text, va="center", size=8.2, color=INK)
    axes.text(x, y - 1.45, remark, va="center", size=7.2, color=FAINT, style="italic")


def draw_band(axes: Axes, box: Box, text: str) -> None:
    """Draw a band across the whole width, and arrows to it from the boxes above."""
    box.draw(axes, PALE)
    place = WIDTH / 2, box.y + box.height / 2
    axes.text(*place, text, ha="center", va="center", size=9.5, color=INK)
    for above in columns(4, 0, 0):
        middle = above.x + above.width / 2
        arrow(axes, (middle, box.y + box.height + GAP), (middle, box.y + box.height))


def draw_worlds(axes: Axes) -> None:
    """Draw the worlds in which the same code can run."""
    for box, (head, body) in zip(columns(len(WORLDS), 0.2, 9.8), WORLDS, strict=True):
        box.draw(axes, PALE)
        box.head(axes, head)
        box.body(axes, body)
        middle = box.x + box.width / 2
        arrow(axes, (middle, 10.0 + GAP), (middle, 10.0))


def picture() -> Figure:
    """Return the whole drawing."""
    figure = Figure(figsize=(11.5, 11.5 * HEIGHT / WIDTH))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-0.2, WIDTH + 0.2), ylim=(0, HEIGHT))
    axes.set_axis_off()
    draw_loop(axes)
    phases = load(ROOT).phases
    for box, phase, colour in zip(columns(4, 23.0, 41.0), phases, PHASES, strict=True):
        draw_phase(axes, box, phase, colour)
    draw_band(axes, Box(0, 17.3, WIDTH, 4.1), TOGETHER)
    draw_band(axes, Box(0, 11.6, WIDTH, 4.1), API)
    draw_worlds(axes)
    return figure


def main() -> None:
    """Write the picture to its file."""
    rcParams["svg.hashsalt"] = "course"  # makes the file the same every time
    rcParams["svg.fonttype"] = "none"  # text, not outlines, for a quarter of the size
    picture().savefig(PICTURE, metadata={"Date": None})
    PICTURE.write_text(NEEDLESS.sub("", PICTURE.read_text()))


if __name__ == "__main__":
    main()
