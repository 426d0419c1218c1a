"""The streams of a backward pass: each gradient is computed on the stream of its forward operation.

    with torch.cuda.stream(side):
        y = model(x)              nodes 17 to 29 of the graph
    y.sum().backward()            computes their gradients on side, and lets the stream of the call
                                  wait for it at the end

autograd numbers its nodes in the order in which a thread makes them, so it is enough to know the
number of the first node behind each change of the current stream.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import Variable

from distlab.sim.gpu.streams import Mark, Stream

_next_number: Any = torch._C._autograd._get_sequence_nr
MAX_SWITCHES = 10_000  # older ones belong to graphs that are long gone
_OF_LEAVES = 2**63  # numbers of the nodes that accumulate gradients are larger


class Switches:
    """The current streams of one thread, by the number of the first node made on them."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._streams: list[Stream] = []

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, stream: Stream) -> None:
        """Note that a stream becomes the current one."""
        self._numbers.append(_next_number())
        self._streams.append(stream)
        if len(self._numbers) > MAX_SWITCHES:
            del self._numbers[: MAX_SWITCHES // 2], self._streams[: MAX_SWITCHES // 2]

    def at(self, number: int, index: int) -> Stream | None:
        """Return the stream that was current on a GPU when a node was made; None: the default."""
        before = self._streams[: bisect_right(self._numbers, number)]
        return next((stream for stream in reversed(before) if stream.index == index), None)


class Backward:
    """A backward pass of one thread.

    Args:
        outside: Current streams of the call, by GPU, as far as they are not the default ones.
    """

    def __init__(self, outside: Mapping[int, Stream]) -> None:
        self.outside = outside
        self._used: dict[Stream, Stream] = {}  # for each stream, the one that waits for it
        self._last: Stream | None = None

    def enter(self, number: int, found: Stream, around: Stream) -> Stream:
        """Return the stream of a node, which waits for the node before.

        Args:
            number: Number of the node.
            found: Stream of the node's forward operation.
            around: Stream of the call on the same GPU.
        """
        last = self._last or around
        stream = last if number >= _OF_LEAVES and last.index == found.index else found
        if stream is not last:
            Mark.of(last, 0.0).hold([stream])
        if stream is not around and stream not in self._used:
            if not self._used:
                Variable._execution_engine.queue_callback(self.leave)
            self._used[stream] = around
        self._last = stream
        return stream

    def leave(self) -> None:
        """Let the streams of the call wait for all others, as autograd does before callbacks."""
        for stream, around in self._used.items():
            Mark.of(stream, 0.0).hold([around])
