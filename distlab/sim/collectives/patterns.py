"""The message patterns of collectives: senders, receivers and sizes.

    members   the group's GPUs in order of their positions 0 … p-1; a root is at position 0
    n         bytes of the whole buffer; each share is n/p
    α, β      seconds per message, seconds per byte; `algorithms` has a table of all costs
    lg        logarithm to base 2

Some collectives are missing here because they are the mirror images of others (`phases.mirrored`):
reduce mirrors broadcast, gather mirrors scatter, and reduce-scatter mirrors all-gather. Adding
takes no time.

A group of one has nothing to send, so its patterns are empty.
"""

from collections.abc import Iterator, Sequence

from distlab.sim.collectives.phases import Phase, Phases, mirrored

# Rings, and patterns that send every share straight to its receiver


def ring(members: Sequence[int], n: float, laps: int = 1) -> Phases:
    """Pass shares to the right neighbour, p-1 times per lap.

    One lap is an all-gather or a reduce-scatter, and two laps are an all-reduce. For two laps with
    p = 4 and n = 1000, every member sends 250 bytes to the right 6 times, 1500 bytes in total.

    Source: Patarasuk and Yuan 2009 (all-reduce); Thakur, Rabenseifner and Gropp 2005, section 4.1.
    """
    p = len(members)
    if p == 1:
        return []
    right = [*members[1:], members[0]]
    return [
        Phase(tuple((a, b, n / p) for a, b in zip(members, right, strict=True)), laps * (p - 1))
    ]


def ring_twice(members: Sequence[int], n: float) -> Phases:
    """All-reduce: a lap of reduce-scatter, then a lap of all-gather."""
    return ring(members, n, laps=2)


def pairwise(members: Sequence[int], n: float) -> Phases:
    """All-to-all: in round s every member sends one share to the member s positions ahead.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.3.
    """
    p = len(members)
    return [
        Phase(tuple((members[i], members[(i + step) % p], n / p) for i in range(p)))
        for step in range(1, p)
    ]


def one_by_one(members: Sequence[int], n: float) -> Phases:
    """Scatter: the root sends the other members their shares, one member at a time."""
    root, *receivers = members
    return [Phase(((root, receiver, n / len(members)),)) for receiver in receivers]


# Binomial trees


def _branches(p: int) -> Iterator[tuple[int, range]]:
    """Yield the distance and the senders of each round's messages, from the root outwards.

    p = 6:   distance 4   0→4
                      2   0→2
                      1   0→1  2→3  4→5
    A member that receives at distance d becomes the root of a subtree of d positions, starting at
    its own. Long distances come first, so that a node that holds 8 neighbouring positions is
    entered only once.
    """
    distance = _power_of_two_from(p) // 2
    while distance:
        yield distance, range(0, p - distance, 2 * distance)
        distance //= 2


def tree_broadcast(members: Sequence[int], n: float) -> Phases:
    """Broadcast: copy the root's buffer to all members, along a binomial tree.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.2.
    """
    return [
        Phase(tuple((members[i], members[i + distance], n) for i in senders))
        for distance, senders in _branches(len(members))
    ]


def tree_all_reduce(members: Sequence[int], n: float) -> Phases:
    """All-reduce: reduce to position 0, then broadcast from there."""
    down = tree_broadcast(members, n)
    return mirrored(down) + down


def tree_scatter(members: Sequence[int], n: float) -> Phases:
    """Scatter: send each subtree the shares of all its members.

    For p = 4 and n = 1000, messages have 500 bytes in the first round, and 250 in the second.
    """
    p = len(members)
    return [
        Phase(
            tuple(
                (members[i], members[i + distance], min(distance, p - i - distance) * n / p)
                for i in senders
            )
        )
        for distance, senders in _branches(p)
    ]


# Distances 1, 2, 4, …: lg p rounds that keep all members busy


def doubling_all_gather(members: Sequence[int], n: float) -> Phases:
    """All-gather: in every round, members pass on all that they have, so their data doubles.

    For p = 4 and n = 1000, each member sends 250 bytes, then 500. For p = 2^k, partners swap their
    data (recursive doubling). For other p, each member sends to the one ``distance`` positions
    back, and in the last round only the shares that it lacks (Bruck's algorithm). Run
    backwards, these two are recursive halving and Träff's reduce-scatter.

    Source: Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.4; Träff 2024, arXiv 2410.14234.
    """
    p = len(members)
    if p == _power_of_two_from(p):
        return [_swaps(members, distance, distance * n / p) for distance in _doublings(p)]
    return [
        _shift(members, -distance, min(distance, p - distance) * n / p)
        for distance in _doublings(p)
    ]


def ring_broadcast(members: Sequence[int], n: float) -> Phases:
    """Broadcast: scatter along a tree, then all-gather along the ring.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.2.
    """
    return tree_scatter(members, n) + ring(members, n)


def doubling_broadcast(members: Sequence[int], n: float) -> Phases:
    """Broadcast: scatter along a tree, then all-gather by doubling.

    Run backwards, this is Rabenseifner's reduce.

    Source: Thakur, Rabenseifner and Gropp 2005, sections 4.2 and 4.5.
    """
    return tree_scatter(members, n) + doubling_all_gather(members, n)


def bruck_all_to_all(members: Sequence[int], n: float) -> Phases:
    """All-to-all in few rounds: a share travels in hops of 1, 2, 4, … that add up to its distance.

    For p = 4, a share for the member 3 positions ahead hops 1, then 2, so it is sent twice.

    Cost: lg p α + (n/2) lg p β for p = 2^k. For other p, a round of hops of ``distance`` carries
        one share for each total distance below p that includes such a hop.
    Source: Bruck et al. 1997; Thakur, Rabenseifner and Gropp 2005, section 4.3.
    """
    p = len(members)
    return [
        _shift(members, distance, sum(1 for total in range(p) if total & distance) * n / p)
        for distance in _doublings(p)
    ]


def dissemination(members: Sequence[int], n: float) -> Phases:
    """Barrier: tell the member 1, 2, 4, … positions ahead about all arrivals known so far.

    Source: Hensgen, Finkel and Manber 1988.
    """
    return [_shift(members, distance, n) for distance in _doublings(len(members))]


def doubling_all_reduce(members: Sequence[int], n: float) -> Phases:
    """All-reduce: partners at distance 1, 2, 4, … swap their whole sums.

    Cost: lg p (α + nβ) for p = 2^k, (⌊lg p⌋ + 2)(α + nβ) for other p; see `_fold`.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5.
    """
    fold, core = _fold(members, n)
    swaps = [_swaps(core, distance, n) for distance in _doublings(len(core))]
    return fold + swaps + mirrored(fold)


def halving_doubling_all_reduce(members: Sequence[int], n: float) -> Phases:
    """Rabenseifner's all-reduce: halve the part left to sum, then double the finished part.

    For p = 4 and n = 1000:
        reduce-scatter   distance 1: 500 bytes, distance 2: 250
        all-gather       distance 2: 250 bytes, distance 1: 500

    The largest messages go to the nearest partner, as in MPICH.

    Cost: 2 lg p α + 2n(p-1)/p β for p = 2^k. For other p, with P the largest power of two below p,
        (2 lg P + 2)α + (2(P-1)/P + 2)nβ; see `_fold`.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5.
    """
    fold, core = _fold(members, n)
    halve = [_swaps(core, distance, n / (2 * distance)) for distance in _doublings(len(core))]
    return fold + halve + mirrored(fold + halve)


def _fold(members: Sequence[int], n: float) -> tuple[Phases, list[int]]:
    """Reduce the members to a power of two: each surplus member sends its buffer to a neighbour.

    For p = 6, member 1 sends to 0, and 3 to 2; then 0, 2, 4 and 5 continue. At the end, the
    mirrored phase sends the results back.
    """
    p = len(members)
    surplus = p - _power_of_two_from(p + 1) // 2
    leaving, staying = members[1 : 2 * surplus : 2], members[0 : 2 * surplus : 2]
    pairs = tuple((a, b, n) for a, b in zip(leaving, staying, strict=True))
    return [Phase(pairs)] if pairs else [], [*staying, *members[2 * surplus :]]


def _swaps(members: Sequence[int], distance: int, size: float) -> Phase:
    """Return a phase in which the members at positions i and i XOR ``distance`` swap data."""
    return Phase(tuple((src, members[i ^ distance], size) for i, src in enumerate(members)))


def _shift(members: Sequence[int], distance: int, size: float) -> Phase:
    """Return a phase in which each member sends to the one ``distance`` positions ahead."""
    p = len(members)
    return Phase(tuple((src, members[(i + distance) % p], size) for i, src in enumerate(members)))


def _doublings(p: int) -> list[int]:
    """Return the powers of two 1, 2, 4, … below p."""
    return [1 << k for k in range((p - 1).bit_length())]


def _power_of_two_from(p: int) -> int:
    """Return the smallest power of two that is at least p."""
    return 1 << (p - 1).bit_length()
