"""Errors for calls that do not form one collective; they show which rank called what, and where."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distlab.process_group.call import Call
from distlab.sim.reporting.errors import Mismatch
from distlab.sim.reporting.report import Row, mismatch, shorten
from distlab.sim.reporting.torch_calls import advice_for
from distlab.util.text import joined, rank_names

NUM_TENSORS = "number of tensors"
MAX_SIDES = 4  # sides (sets of ranks that agree) named in the headline
MAX_ROWS = 12
TWO_CALLS = (
    "If these are two different calls of the program, the ranks make them in another order, or one "
    "of them skips one."
)
_OF_PARTS = ("all_gather", "gather", "reduce_scatter")  # whose parts programs want to be uneven
_PAD = (
    "Where ranks have unequal numbers of elements, gather these numbers first, pad to the largest, "
    "and cut the result."
)
_GO_FIRST = (
    "If one rank goes first through a block, between two barriers, call collectives outside of it."
)
_UNEVEN_SHARDS = (
    "The ranks' shards have different sizes. DTensor.from_local takes them for equal: pad them, or "
    "give it shape= and stride= of a whole tensor that is split as torch.chunk splits. If you have "
    "not used it:"
)
_LIST = "On NCCL, a list of tensors of the right sizes would do, too."


class RankCall(NamedTuple):
    """One rank's call; its ``values`` must be the same on all ranks."""

    rank: int
    name: str
    maker: str  # torch function that made the call; "" if the program made it
    values: dict[str, object]  # arguments by name, as written in a report
    row: Row

    def key(self) -> str:
        """Return a key that calls have in common only if they agree."""
        return f"{self.name} {sorted(self.values.items())}"


def values_of(call: Call, group: Sequence[int]) -> dict[str, object]:
    """Return the arguments that must be equal on all ranks; the root is given as a global rank."""
    values: dict[str, Any] = {**call.must_agree, "device": device_of(call)}
    if call.is_coalesced:
        values[NUM_TENSORS] = len(call.inputs)
    if "root" in values:
        values["root"] = group[call.root]
    return values


def device_of(call: Call) -> str:
    """Return the call's device type, ``cpu`` or ``meta``; meta tensors match only meta tensors."""
    return joined(sorted({x[0].device.type for x in (call.inputs, call.outputs) if x}))


def disagreement(calls: Sequence[RankCall]) -> Mismatch:
    """Return the error for calls that differ; it shows each side's ranks, arguments and lines.

    For example, "all_reduce with op MAX on rank 2, but with op SUM on ranks 0, 1 and 3".
    """
    sides: dict[str, list[RankCall]] = {}
    for call in calls:
        sides.setdefault(call.key(), []).append(call)
    ordered = list(sides.values())
    rows = shorten(_merged(calls), MAX_ROWS)
    by_torch = advice_for({call.rank: call.maker for call in calls})
    if len({call.name for call in calls}) > 1:
        names = [(side, side[0].name) for side in ordered]
        same = "Every rank of a group must make the same collective calls in the same order."
        is_at_barrier = any(name == "barrier" for _, name in names) and not by_torch
        advice = " ".join(filter(None, [same, by_torch, _GO_FIRST * is_at_barrier]))
        return mismatch("operation mismatch", _headline(names), rows, advice)
    words = [word for word in calls[0].values if len({str(g.values.get(word)) for g in calls}) > 1]
    if NUM_TENSORS in words:  # shapes and dtypes then differ too, but add nothing
        words = [NUM_TENSORS]
    details = [(side, f"with {_details(side[0], words)}") for side in ordered]
    is_shape = {"size", "dtype", "device", NUM_TENSORS}.issuperset(words)
    advice = f"In one collective call all ranks must give the same {joined(words)}."
    if by_torch:
        advice = f"{_UNEVEN_SHARDS} {by_torch}" if _are_shards(calls, words) else by_torch
    elif len({call.row.where for call in calls}) > 1:
        advice += f" {TWO_CALLS}"
    elif is_shape:
        advice += f"{_on_parts(calls[0], words)} {TWO_CALLS}"
    kind: Any = "shape or dtype mismatch" if is_shape else "operation mismatch"
    return mismatch(kind, f"{calls[0].name} {_headline(details)}", rows, advice)


def _are_shards(calls: Sequence[RankCall], words: Sequence[str]) -> bool:
    """Return whether all ranks gather a DTensor at one line, and differ in the sizes."""
    is_one_call = len({(call.maker, call.row.where) for call in calls}) == 1
    is_gathered = calls[0].name.endswith("all_gather") and calls[0].maker.startswith("DTensor")
    return is_one_call and is_gathered and words == ["size"]


def _on_parts(call: RankCall, words: Sequence[str]) -> str:
    """Return advice on parts of unequal sizes; "" if the call has none."""
    if call.name not in _OF_PARTS or words != ["size"] or isinstance(call.values["size"], list):
        return ""
    has_lists = call.values["device"] == "cuda" and call.name != "gather"
    return f" {_PAD} {_LIST}" if has_lists else f" {_PAD}"


def _headline(sides: Sequence[tuple[Sequence[RankCall], str]]) -> str:
    texts = [f"{text} on {rank_names(g.rank for g in side)}" for side, text in sides[:MAX_SIDES]]
    if len(sides) > MAX_SIDES:
        texts[-1] = f"other values on {len(sides) - MAX_SIDES + 1} more"
    return ", but ".join(texts) if len(texts) == 2 else joined(texts)


def _details(call: RankCall, words: Iterable[str]) -> str:
    """Return the named arguments with their values, such as ``size 4 and dtype float32``."""
    return joined([f"{word} {str(call.values.get(word)).removeprefix('torch.')}" for word in words])


def _merged(calls: Iterable[RankCall]) -> list[Row]:
    """Return one row per distinct call, with all ranks that made it."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for call in calls:
        ranks.setdefault((call.key(), call.row.text, call.row.where), []).append(call.rank)
    return [Row(tuple(who), text, where) for (_, text, where), who in ranks.items()]


def unequal_parts(calls: Sequence[Call], rows: Sequence[Row]) -> Mismatch | None:
    """Return an error if any rank in ``all_to_all`` is sent more or less than it expects."""
    for i, sender in enumerate(calls):
        for k, receiver in enumerate(calls):
            sent, expected = sender.inputs[k].numel(), receiver.outputs[i].numel()
            if sent != expected:
                return mismatch(
                    "shape or dtype mismatch",
                    f"in all_to_all {rank_names(rows[i].ranks)} sends {sent} elements to "
                    f"{rank_names(rows[k].ranks)}, which expects {expected}",
                    [rows[i], rows[k]],
                    "The sender's input split for a rank is that rank's output split for the "
                    "sender. Where each rank chooses its input splits, exchange them first, by an "
                    "all_to_all of these numbers, and take what arrives as output splits.",
                )
    return None
