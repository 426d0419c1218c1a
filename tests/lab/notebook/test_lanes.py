"""``%cluster --lanes``: what the ranks did in the last cell, in the time of that cell."""

from collections.abc import Iterator

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver
from matplotlib.text import Text
from notebooks import run

from distlab.notebook.page import Picture
from distlab.notebook.simulated import SimulatedRanks
from distlab.sim import Cluster, Options

SIZE = 4


def begun(**options: object) -> SimulatedRanks:
    return SimulatedRanks(SIZE, Cluster.preset("dgx-h100", 1), Options(**options))  # type: ignore[arg-type]


@pytest.fixture
def ranks() -> Iterator[SimulatedRanks]:
    ranks = begun()
    yield ranks
    ranks.close()


@pytest.fixture
def on_gpus() -> Iterator[SimulatedRanks]:
    ranks = begun(semantics="nccl")
    yield ranks
    ranks.close()


def lanes(ranks: SimulatedRanks, source: str, *chosen: int) -> Figure:
    """Return the lanes of a cell on some ranks, or on all."""
    run(ranks, source, *chosen)
    return ranks.lanes()


def bars(figure: Figure, name: str) -> list[tuple[int, float, float]]:
    """Return rank, start and end of each bar labelled ``name``, in the picture's unit."""
    return sorted(
        (round(path.vertices[:, 1].mean()), *path.vertices[:, 0][[0, 1]])
        for shapes in figure.axes[0].collections
        if isinstance(shapes, PolyCollection) and shapes.get_label() == name
        for path in shapes.get_paths()
    )


def arrows(figure: Figure) -> list[tuple[float, int, int]]:
    """Return start, sender and receiver of each message."""
    return [
        (x, round(y), round(y + v))
        for shapes in figure.axes[0].collections
        if isinstance(shapes, Quiver)
        for x, y, v in zip(shapes.X, shapes.Y, shapes.V, strict=True)
    ]


def words(figure: Figure) -> list[str]:
    return [text.get_text().strip() for text in figure.findobj(Text)]


ALL_REDUCE = "x = torch.ones(1 << 20)\ndist.all_reduce(x)"


def test_each_cell_begins_at_0(ranks: SimulatedRanks) -> None:
    first, second = lanes(ranks, ALL_REDUCE), lanes(ranks, ALL_REDUCE)
    assert first.get_suptitle() == "cell 5"
    assert bars(first, "computing")[0][:2] == (0, 0)
    for name in ("computing", "waiting", "all_reduce"):
        assert [rank for rank, _, _ in bars(first, name)] == [0, 1, 2, 3]
        for before, now in zip(bars(first, name), bars(second, name), strict=True):
            assert now == pytest.approx(before)


@pytest.mark.parametrize("eager_bytes", [-1, 1 << 20])
def test_a_message_of_an_earlier_cell_begins_at_0(eager_bytes: int) -> None:
    ranks = begun(eager_bytes=eager_bytes)
    lanes(ranks, "work = dist.isend(torch.ones(1), 1)", 0)
    figure = lanes(ranks, "x = torch.ones(1 << 20)\ndist.recv(x[:1], 0)", 1)
    [(start, sender, receiver)] = arrows(figure)
    assert (sender, receiver) == (0, 1)
    assert start == pytest.approx(0 if eager_bytes > 0 else bars(figure, "receiving")[0][1])
    ranks.close()


def test_there_is_nothing_to_draw(ranks: SimulatedRanks) -> None:
    with pytest.raises(ValueError, match="no cell has run yet"):
        ranks.lanes()
    with pytest.raises(ValueError, match="the last cell sent nothing and took no virtual time"):
        lanes(ranks, "1 + 1")


def test_after_a_deadlock_one_sees_who_waits_and_since_when(ranks: SimulatedRanks) -> None:
    figure = lanes(
        ranks, "x = torch.ones(1 << 20)\nif rank:\n    dist.recv(x, 0)\nelse:\n    x.exp()"
    )
    [(_, _, end)] = [bar for bar in bars(figure, "computing") if bar[0] == 0]
    waits = [(rank, since, until) for rank, since, until in bars(figure, "waiting")]
    assert [rank for rank, _, _ in waits] == [1, 2, 3]
    assert all(0 < since < until == pytest.approx(end) for _, since, until in waits)
    still = bars(figure, "still waiting at the end")
    assert [(rank, pytest.approx(start)) for rank, start, _ in still] == [
        (n, end) for n in (1, 2, 3)
    ]
    assert words(figure).count("recv from rank 0") == 3
    assert not bars(lanes(ranks, "x.exp()"), "still waiting at the end")


def test_a_deadlock_that_takes_no_time_is_drawn(on_gpus: SimulatedRanks) -> None:
    figure = lanes(on_gpus, "dist.broadcast_object_list([1], 1) if rank != 1 else None")
    assert [rank for rank, _, _ in bars(figure, "still waiting at the end")] == [0, 2, 3]


def test_an_exception_ends_the_computation_before_it(ranks: SimulatedRanks) -> None:
    figure = lanes(ranks, "if rank == 3:\n    torch.ones(1 << 20).exp()\n    1 / 0\ndist.barrier()")
    assert [rank for rank, _, _ in bars(figure, "computing")] == [3]
    assert words(figure).count("barrier") == 3


def test_gpus_go_on_after_the_cell_that_launched_their_work(on_gpus: SimulatedRanks) -> None:
    first = lanes(on_gpus, "x = torch.ones(1 << 26, device=device)\nx = x * 2", 0)
    second = lanes(on_gpus, "y = torch.ones(1, device=device)", 1)
    [(rank, start, end)] = bars(first, "GPU busy")
    assert (rank, 0 < start < end) == (0, True)
    assert not [bar for bar in bars(first, "ended") if bar[0] == 0]
    later, own = bars(second, "GPU busy")
    assert later[:2] == (0, 0)
    assert 0 < later[2] < end
    assert own[0] == 1
    third = lanes(on_gpus, "torch.cuda.synchronize()\ny = y * 2\ntorch.cuda.synchronize()")
    assert bars(third, "GPU busy")[0][:2] == (0, 0)


def test_the_picture_fits_into_narrow_and_dark_pages(ranks: SimulatedRanks) -> None:
    svg = Picture(lanes(ranks, ALL_REDUCE))._repr_mimebundle_()["image/svg+xml"]
    assert "fill: #ffffff" in svg.split("</g>")[0]
    assert 'width="100%" viewBox="0 0 ' in svg
