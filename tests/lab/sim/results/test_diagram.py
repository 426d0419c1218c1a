"""Pictures of a run: every event is drawn, but with many ranks, no arrows and fewer names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.quiver import Quiver
from matplotlib.text import Text
from pictured import compute, exchange, overlapped, ring, run

from distlab.sim import Faults, Simulated
from distlab.sim.results.diagram import gantt, space_time


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def bars(figure: Figure, name: str) -> list[tuple[float, float]]:
    """Return the start and end of each bar labelled ``name``, in the picture's unit."""
    return [
        (path.vertices[:, 0].min(), path.vertices[:, 0].max())
        for shapes in figure.axes[0].collections
        if isinstance(shapes, PolyCollection) and shapes.get_label() == name
        for path in shapes.get_paths()
    ]


def arrows(figure: Figure) -> list[Quiver]:
    return [shape for shape in figure.axes[0].collections if isinstance(shape, Quiver)]


def events(simulated: Simulated[Any], kind: str) -> list[Any]:
    return [event for event in simulated.trace.events if event.kind == kind]


@pytest.mark.parametrize("draw", [space_time, gantt])
def test_pictures_are_written_in_the_format_of_their_ending(draw: Any, tmp_path: Path) -> None:
    figure = draw(run(ring, 4))
    figure.savefig(tmp_path / "picture.png")
    figure.savefig(tmp_path / "picture.svg")
    pixels = imread(tmp_path / "picture.png")
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels[::5, ::5].reshape(-1, 4), axis=0)) > 10
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_every_event_has_its_bar_at_its_time() -> None:
    simulated = run(overlapped, 4)
    figure = space_time(simulated)
    for kind, name in (
        ("compute", "computing"),
        ("wait", "waiting"),
        ("collective", "all_reduce"),
    ):
        drawn = sorted(bars(figure, name))
        happened = sorted((e.start_s * 1e6, e.end_s * 1e6) for e in events(simulated, kind))
        np.testing.assert_allclose(drawn, happened)
    assert "virtual time (µs)" in words(figure)


def test_every_message_is_an_arrow_from_lane_to_lane() -> None:
    simulated = run(ring, 8)
    (quiver,) = arrows(space_time(simulated))
    assert len(quiver.X) == len(events(simulated, "send")) == 8 * 14
    ends = {(round(y), round(y + v)) for y, v in zip(quiver.Y, quiver.V, strict=True)}
    assert ends == {(rank, (rank + 1) % 8) for rank in range(8)}
    assert (quiver.U > 0).all()
    last_us = max(x + u for x, u in zip(quiver.X, quiver.U, strict=True))
    assert last_us == pytest.approx(simulated.seconds * 1e6)


def pass_on() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange(torch.empty(4, device="meta"), (rank + 1) % size, (rank - 1) % size)


@pytest.mark.parametrize(("num_ranks", "second"), [(32, "rank 1"), (33, "rank 2")])
def test_many_ranks_have_no_arrows_and_only_some_names(num_ranks: int, second: str) -> None:
    figure = space_time(run(pass_on, num_ranks))
    assert bool(arrows(figure)) == (num_ranks <= 32)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["rank 0", second]


def late_receiver() -> None:
    """Rank 0 computes before it receives, rank 1 sends immediately, and rank 2 does nothing."""
    x = torch.empty(10**6, device="meta")
    if dist.get_rank() == 0:
        compute()
        dist.recv(x, 1)
    elif dist.get_rank() == 1:
        dist.send(x, 0)


def test_a_sender_waits_until_the_receiver_is_there_and_sends_from_then_on() -> None:
    figure = space_time(run(late_receiver, 3))
    [(begin, met)], [(sent, end)] = bars(figure, "waiting"), bars(figure, "sending")
    assert begin == 0
    assert 0 < met == sent < end
    assert bars(figure, "receiving") == [(sent, end)]
    assert bars(figure, "ended") == [(0, end)], "rank 2"


def test_a_killed_rank_is_marked() -> None:
    def wait_in_vain() -> None:
        compute(10)
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)

    figure = space_time(run(wait_in_vain, 2, faults=Faults(kill_ranks={1: 4e-5})))
    (cross,) = [shape for shape in figure.axes[0].collections if shape.get_label() == "killed"]
    assert cross.get_offsets().tolist() == [[pytest.approx(40), 1]]
