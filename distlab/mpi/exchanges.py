"""The MPI calls that make up each collective.

Each of these functions is a generator that posts requests, yields those that must complete before
it continues, and writes the outputs at the end. It starts only after the ranks have agreed on the
call.
"""

from collections.abc import Callable, Generator

from mpi4py import MPI

from distlab.mpi.memory import Operand, flat, joined, raw, write
from distlab.mpi.runtime import Mismatch
from distlab.process_group.call import Call

Exchange = Generator[list[MPI.Request], list[MPI.Status], None]


def broadcast(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Copy the root's tensors to all ranks, in place."""
    yield [comm.Ibcast(raw(tensor), call.root) for tensor in call.outputs]


def all_reduce(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Reduce the ranks' tensors, and write the result to every rank."""
    operands = [Operand([tensor], call.op) for tensor in call.inputs]
    yield [comm.Iallreduce(MPI.IN_PLACE, part.memory(), part.op) for part in operands]
    for output, part in zip(call.outputs, operands, strict=True):
        write([output], part.result(comm.size))


def reduce(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Reduce the ranks' tensors, and write the result to the root; only the root has outputs."""
    operands = [Operand([tensor], call.op) for tensor in call.inputs]
    yield [_reduce_to(comm, call.root, part) for part in operands]
    for output, part in zip(call.outputs, operands, strict=False):
        write([output], part.result(comm.size))


def _reduce_to(comm: MPI.Intracomm, root: int, part: Operand) -> MPI.Request:
    if comm.rank == root:
        return comm.Ireduce(MPI.IN_PLACE, part.memory(), part.op, root)
    return comm.Ireduce(part.memory(), None, part.op, root)


def all_gather(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Write the tensors of all ranks to every rank."""
    rows = [x.new_empty(comm.size * x.numel()) for x in call.inputs]
    pairs = zip(call.inputs, rows, strict=True)
    yield [comm.Iallgather(raw(mine), raw(row)) for mine, row in pairs]
    for k, row in enumerate(rows):
        write(call.outputs[k * comm.size : (k + 1) * comm.size], row)


def gather(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Write the tensors of all ranks to the root; only the root has outputs."""
    [mine] = call.inputs
    row = mine.new_empty(comm.size * mine.numel() if call.outputs else 0)
    yield [comm.Igather(raw(mine), raw(row) if comm.rank == call.root else None, call.root)]
    write(call.outputs, row)


def scatter(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Write the root's k-th tensor to rank k; only the root has inputs."""
    row = raw(joined(call.inputs)) if call.inputs else None
    yield [comm.Iscatter(row, raw(call.outputs[0]), call.root)]


def reduce_scatter(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Reduce the k-th tensors of all ranks, and write the result to rank k."""
    size = comm.size
    starts = range(0, len(call.inputs), size)
    operands = [Operand(call.inputs[start : start + size], call.op) for start in starts]
    yield [comm.Ireduce_scatter_block(MPI.IN_PLACE, part.memory(), part.op) for part in operands]
    for output, part in zip(call.outputs, operands, strict=True):
        write([output], part.result(size)[: output.numel()])


def all_to_all(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Send the k-th input of every rank to rank k, one message each, and check the sizes.

    Raises:
        Mismatch: A rank sends fewer elements than this one expects.
    """
    # Receive into separate memory, because an output may overlap an input.
    rows = [flat(output).clone() for output in call.outputs]
    recvs = [comm.Irecv(raw(row), src) for src, row in enumerate(rows)]
    sends = [comm.Isend(raw(tensor), dst) for dst, tensor in enumerate(call.inputs)]
    statuses = yield recvs + sends
    for src, row in enumerate(rows):
        sent, expected = statuses[src].Get_count(MPI.BYTE) // row.itemsize, row.numel()
        if sent != expected:
            raise Mismatch(
                f"rank {comm.rank} of the group expects {expected} elements from rank {src}, which "
                f"sends {sent}"
            )
        write([call.outputs[src]], row)


def barrier(comm: MPI.Intracomm, call: Call) -> Exchange:
    """Move nothing: all ranks are already known to have made the call."""
    yield []


EXCHANGES: dict[str, Callable[[MPI.Intracomm, Call], Exchange]] = {
    exchange.__name__: exchange
    for exchange in (
        *(broadcast, all_reduce, reduce, all_gather, gather),
        *(scatter, reduce_scatter, all_to_all, barrier),
    )
}
