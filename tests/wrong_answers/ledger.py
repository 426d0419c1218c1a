"""The contract ledger: what a task promises, and which test a violation fails.

``tests/phase1/ledger/1.4.toml`` has an entry for every sentence of the docstring and of the TODO,
and for those of the guidelines that promise more:

    [[promise]]
    where = "docstring"                     # or "todo", "guidelines"
    text = "Both are posted before either is waited for."
    tests = ["test_both_directions_travel_at_the_same_time"]
    violated_by = ["blocking_calls"]        # of the own bank

    [[explains]]                            # promises nothing by itself
    where = "todo"
    text = "About 6 lines."
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.course import Task
from wrong_answers.bank import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLACES = ("docstring", "todo", "guidelines")
LABELS = r"\b(Args|Returns|Raises|Cost|Source|Attributes|TODO \d+\.\d+)\b"


@dataclass(frozen=True)
class Entry:
    """A sentence of the contract; without tests, it only explains."""

    where: str
    text: str
    tests: tuple[str, ...] = ()
    violated_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """All entries of a task."""

    promises: tuple[Entry, ...]
    explanations: tuple[Entry, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Promises, then explanations."""
        return self.promises + self.explanations


def path(task: Task) -> Path:
    """Return the file of a task's ledger."""
    return ROOT / "tests" / f"phase{task.id.partition('.')[0]}" / "ledger" / f"{task.id}.toml"


def load(task: Task) -> Ledger:
    """Read the ledger of a task.

    Raises:
        KeyError: an entry lacks something, or has something unknown.
    """
    tables: dict[str, Any] = tomllib.loads(path(task).read_text(encoding="utf-8"))
    if unknown := set(tables) - {"promise", "explains"}:
        raise KeyError(f"{path(task).name}: unknown tables {sorted(unknown)}")
    promises = tuple(_promise(table) for table in tables["promise"])
    return Ledger(promises, tuple(Entry(**table) for table in tables.get("explains", ())))


def _promise(table: dict[str, Any]) -> Entry:
    tests, violated_by = tuple(table["tests"]), tuple(table["violated_by"])
    return Entry(table["where"], table["text"], tests, violated_by)


def contract(task: Task) -> dict[str, str]:
    """Return what a task says to its learner, by place, line breaks folded to one blank."""
    template = (ROOT / task.template).read_text(encoding="utf-8")
    tree = ast.parse(template)
    functions = [_function(tree, name) for name in task.functions]
    docstrings = [ast.get_docstring(node) or "" for node in (*_classes(tree, task), *functions)]
    guide = (ROOT / task.folder / "guidelines.md").read_text(encoding="utf-8")
    section = guide.partition(f"\n## {task.heading}\n")[2].partition("\n## ")[0]
    return {
        "docstring": folded(" ".join(docstrings)),
        "todo": folded(" ".join(_todo(template, node) for node in functions)),
        "guidelines": folded(section),
    }


def _classes(tree: ast.Module, task: Task) -> list[ast.ClassDef]:
    """Return the classes of methods: their docstrings are part of the contract."""
    names = {name.partition(".")[0] for name in task.functions if "." in name}
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]


def _function(tree: ast.AST, name: str) -> ast.FunctionDef:
    """Find a function, or a method by ``Class.method``."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name == first and rest:
            return _function(node, rest)
        if isinstance(node, ast.FunctionDef) and node.name == first and not rest:
            return node
    raise LookupError(f"no function {name}")


def _todo(template: str, node: ast.FunctionDef) -> str:
    lines = template.splitlines()[node.lineno - 1 : node.end_lineno]
    return " ".join(line.strip()[1:] for line in lines if line.strip().startswith("#"))


def folded(text: str) -> str:
    """Fold all white space to single blanks."""
    return re.sub(r"\s+", " ", text).strip()


def not_listed(text: str, entries: Iterator[Entry]) -> str:
    """Return the words of ``text`` that are in no entry, "" if all are."""
    for entry in sorted(entries, key=lambda entry: -len(entry.text)):
        text = text.replace(folded(entry.text), " … ")
    text = re.sub(LABELS, " … ", text)
    return " | ".join(part.strip() for part in text.split("…") if re.search(r"\w", part))
