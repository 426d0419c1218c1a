"""Faults to inject: slow ranks and links, killed ranks, delays and jitter.

Faults(slow_ranks={3: 2.0}, kill_ranks={5: 0.010}, jitter_s=1e-6, seed=7)
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from distlab.util.text import unknown_name


@dataclass(frozen=True)
class Faults:
    """Faults to inject into a simulated world.

    Attributes:
        slow_ranks: rank -> factor on its computation time.
        slow_links: link name pattern -> divisor of the links' bandwidth.
        kill_ranks: rank -> virtual time in seconds after which its next call kills it.
        kill_at_steps: rank -> optimizer step at which it dies, counted from 1.
        delays_s: (source, destination) -> seconds added to every message between them, including
            those of built-in collectives.
        jitter_s: Longest random delay before a communication call. Each seed gives a different
            order of events, so varying the seed fuzzes the schedule.
        seed: Seed of the jitter.

    Raises:
        ValueError: a time is below 0, a factor is not above 0, or a step is below 1.
    """

    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[str, float] = field(default_factory=dict)
    kill_ranks: Mapping[int, float] = field(default_factory=dict)
    kill_at_steps: Mapping[int, int] = field(default_factory=dict)
    delays_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    jitter_s: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, texts: Iterable[str], seed: int = 0) -> "Faults":
        """Parse faults written as text, such as ``slow_rank 3 2.0``; ``FORMS`` lists all kinds.

            Faults.parse(["slow_rank 3 2.0", "kill_rank 5 0.01"])

        Raises:
            ValueError: a fault is unknown, or its values are invalid.
        """
        tables: dict[str, Any] = {form.field: {} for form in FORMS.values()}
        for text in texts:
            name, *words = text.split() or [""]
            if name not in FORMS:
                raise unknown_name("fault", name, FORMS)
            key, value = FORMS[name].read(text, words)
            tables[FORMS[name].field][key] = value
        jitter_s = tables.pop("jitter_s").get((), 0.0)
        return cls(**tables, jitter_s=jitter_s, seed=seed)

    def __post_init__(self) -> None:
        slow: dict[Any, float] = {**self.slow_ranks, **self.slow_links}
        for key, factor in slow.items():
            if not 0 < factor < inf:
                raise ValueError(f"the factor of {key!r} must be above 0, got {factor!r}")
        for rank, step in self.kill_at_steps.items():
            if step < 1:
                raise ValueError(f"kill_at_steps: steps count from 1, but rank {rank} has {step!r}")
        late: dict[Any, float] = {**self.kill_ranks, **self.delays_s, "jitter_s": self.jitter_s}
        for key, seconds in late.items():
            if not 0 <= seconds < inf:
                raise ValueError(f"the seconds of {key!r} must be 0 or more, got {seconds!r}")

    def check_ranks(self, num_ranks: int) -> None:
        """Check that all ranks named in the faults exist.

        Raises:
            ValueError: a rank does not exist; the message says which ranks do.
        """
        named = {
            "slow_rank": list(self.slow_ranks),
            "kill_rank": list(self.kill_ranks),
            "kill_at_step": list(self.kill_at_steps),
            "delay": [rank for pair in self.delays_s for rank in pair],
        }
        for name, ranks in named.items():
            for rank in ranks:
                if rank not in range(num_ranks):
                    raise ValueError(
                        f"{name}: there is no rank {rank!r}; ranks are 0 to {num_ranks - 1}"
                    )

    def jitter(self, rank: int) -> random.Random:
        """Return the random number generator for one rank's jitter."""
        return random.Random(self.seed * 1_000_003 + rank)


@dataclass(frozen=True)
class Form:
    """Syntax of one kind of fault, and the field of ``Faults`` that holds it.

    Attributes:
        field: Name of the field, which maps parsed keys to parsed values (except ``jitter_s``).
        keys: Parsers of all words but the last.
        value: Parser of the last word.
        example: Valid text, shown in errors.
    """

    field: str
    keys: tuple[Callable[[str], Any], ...]
    value: Callable[[str], Any]
    example: str

    def read(self, text: str, words: list[str]) -> tuple[Any, Any]:
        """Parse the words after a fault's name into a key and a value."""
        readers = (*self.keys, self.value)
        try:
            *keys, value = (read(word) for read, word in zip(readers, words, strict=True))
        except ValueError:
            raise ValueError(f"{text!r} must be like {self.example!r}") from None
        return (keys[0] if len(keys) == 1 else tuple(keys)), value


FORMS = {
    "slow_rank": Form("slow_ranks", (int,), float, "slow_rank 3 2.0"),
    "slow_link": Form("slow_links", (str,), float, "slow_link node0.nic* 10"),
    "kill_rank": Form("kill_ranks", (int,), float, "kill_rank 5 0.01"),
    "kill_at_step": Form("kill_at_steps", (int,), int, "kill_at_step 5 3"),
    "delay": Form("delays_s", (int, int), float, "delay 0 1 1e-6"),
    "jitter": Form("jitter_s", (), float, "jitter 1e-6"),
}
