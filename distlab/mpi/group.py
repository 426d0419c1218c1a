"""The process group of the world ``mpi``: it turns ``torch.distributed`` calls into MPI calls."""

import hashlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
from mpi4py import MPI
from torch import Tensor

from distlab.mpi.exchanges import EXCHANGES
from distlab.mpi.memory import raw
from distlab.mpi.runtime import Mismatch, Runtime
from distlab.mpi.work import SAME_SIZE, MpiWork, Steps
from distlab.process_group.base import BaseGroup
from distlab.process_group.call import Call, describe
from distlab.process_group.checks import check_contiguous, check_peer

HEADER_BYTES = 128  # size of the call description that ranks exchange: a digest, then the text
DIGEST_BYTES = 8


class MpiGroup(BaseGroup):
    """One rank's view of a group of MPI ranks.

    MPI does not check that the ranks' collective calls match: it sums vectors of different lengths
    without an error, and overwrites memory. So the ranks first exchange descriptions of their
    calls, and only matching calls reach MPI.

    Args:
        runtime: Runtime of this process.
        ranks: Global ranks of the members, in group order, this rank included.
        name: Name of the group, the same on all ranks, and unique to this group.
        timeout: Time limit of each operation.
    """

    world_name = "mpi"

    def __init__(
        self, runtime: Runtime, ranks: tuple[int, ...], name: str, timeout: timedelta
    ) -> None:
        super().__init__(ranks.index(runtime.comm.rank), len(ranks), name)
        self._runtime, self._ranks, self._timeout = runtime, ranks, timeout
        self._num_calls = 0
        self._assemble()
        members = runtime.comm.Get_group().Incl(ranks)
        self._comm = runtime.comm.Create_group(members)  # for messages, and for agreeing on calls
        self._data = self._comm.Dup()  # for collectives
        self._queue: deque[MpiWork] = deque()
        runtime.queues.append(self._queue)

    def _assemble(self) -> None:
        """Wait for all members, because Create_group would block forever if one had left."""

        def steps() -> Steps:
            yield self._runtime.call_the_roll(self._ranks)
            yield self._runtime.answer_the_roll(self._ranks)

        text = f"new_group of ranks {', '.join(map(str, self._ranks))}"
        MpiWork(self._runtime, steps(), text, self._ranks, self._timeout).wait()

    # Point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MpiWork:
        """Post a send to a rank of the group."""
        [tensor] = tensors
        check_contiguous("send", tensors)
        check_peer("send", dst, len(self._ranks), self._me)

        def steps() -> Steps:
            yield [self._comm.Isend(raw(tensor), dst, tag)]

        peer = self._ranks[dst]
        text = f"send to rank {peer}, {describe(tensor)}, tag {tag}"
        return MpiWork(self._runtime, steps(), text, [peer], self._timeout, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MpiWork:
        """Post a recv from a rank of the group."""
        check_peer("recv", src, len(self._ranks), self._me)
        return self._post_recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        """Post a recv from any rank of the group."""
        return self._post_recv(tensors, MPI.ANY_SOURCE, tag)

    def _post_recv(self, tensors: list[Tensor], src: int, tag: int) -> MpiWork:
        [tensor] = tensors
        check_contiguous("recv", tensors)
        is_any = src == MPI.ANY_SOURCE
        peers = [rank for rank in self._ranks if rank != self._ranks[self._me]]
        if not is_any:
            peers = [self._ranks[src]]

        def steps() -> Steps:
            [status] = yield [self._comm.Irecv(raw(tensor), src, tag)]
            work.source = status.Get_source()
            _check_length(tensor, status.Get_count(MPI.BYTE), self._ranks[work.source])

        sender = "any rank" if is_any else f"rank {peers[0]}"
        text = f"recv from {sender}, {describe(tensor)}, tag {tag}"
        work = MpiWork(self._runtime, steps(), text, peers, self._timeout, tensors, any_peer=is_any)
        return work

    # Collectives

    def _take_part(self, call: Call, results: Sequence[Tensor]) -> MpiWork:
        asked = ", ".join(f"{word} {value}" for word, value in call.must_agree.items())
        text = f"{call.name} #{self._num_calls}" + (f" ({asked})" if asked else "")
        self._num_calls += 1
        return MpiWork(
            self._runtime,
            self._steps(call, text),
            text,
            self._ranks,
            self._timeout,
            results,
            queue=self._queue,
        )

    def _steps(self, call: Call, text: str) -> Steps:
        mine = _header(text)
        everybodys = np.empty((self.size(), HEADER_BYTES), np.uint8)
        yield [self._comm.Iallgather([mine, MPI.BYTE], [everybodys, MPI.BYTE])]
        self._compare(mine, everybodys)
        yield from EXCHANGES[call.name](self._data, call)

    def _compare(self, mine: np.ndarray, everybodys: np.ndarray) -> None:
        """Raise Mismatch if another rank has made a different call than this one."""
        for rank, theirs in zip(self._ranks, everybodys, strict=True):
            if not np.array_equal(theirs, mine):
                text = theirs[DIGEST_BYTES:].tobytes().rstrip(b"\0").decode(errors="replace")
                raise Mismatch(
                    f"rank {rank} called {text}: every rank of a group must make the same "
                    "collective calls, in the same order and with the same sizes"
                )

    def shutdown(self) -> None:
        """Free the communicators."""
        self._runtime.queues = [q for q in self._runtime.queues if q is not self._queue]
        self._data.Free()
        self._comm.Free()


def _header(text: str) -> np.ndarray:
    """Pack a call's text, which must be equal on all ranks, into a fixed number of bytes."""
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()
    return np.frombuffer((digest + encoded)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), np.uint8)


def _check_length(tensor: Tensor, num_bytes: int, sender: int) -> None:
    expected = tensor.numel() * tensor.itemsize
    if num_bytes != expected:
        raise Mismatch(
            f"expected {expected} bytes, and rank {sender} sent {num_bytes}, {SAME_SIZE}"
        )
