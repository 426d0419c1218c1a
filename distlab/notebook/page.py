"""What a cell has shown on its ranks, as HTML and as text."""

import io
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from distlab.notebook.folding import GROUPINGS, MAX_ROWS, Fold, Table, folded, table
from distlab.notebook.output import Bundle, RankOutput
from distlab.notebook.world import Ran
from distlab.util.text import rank_names

# Colours of the page itself, so that it is readable on light and dark grounds.
STYLE = """<style>
.distlab-fold{margin:2px 0 6px 0;border-left:3px solid rgba(59,111,182,.6);padding-left:8px}
.distlab-ranks{opacity:.65;font-size:85%}
.distlab-fold pre,.distlab-report pre,.distlab-note pre{margin:0;white-space:pre-wrap;
 font-family:var(--jp-code-font-family,monospace);word-break:normal;overflow-wrap:anywhere}
.distlab-report{border-left:3px solid #c1121f;padding-left:8px;margin:4px 0}
.distlab-note{border-left:3px solid #c9a227;padding-left:8px;margin:4px 0}
.distlab-cost{opacity:.65;font-size:85%;margin-top:4px}
table.distlab{border-collapse:collapse;font-size:90%}
table.distlab td,table.distlab th{padding:1px 8px;text-align:right}
table.distlab td.differs{background:rgba(230,132,42,.28)}
</style>"""

RUNNING = Ran(cost="running …")


class Page:
    """A cell's output, for ``display``.

    Args:
        outputs: Output of each rank.
        ran: What came of the cell.
        grouping: One of GROUPINGS.
    """

    def __init__(
        self, outputs: Mapping[int, RankOutput], ran: Ran, grouping: str = GROUPINGS[0]
    ) -> None:
        self._ran = ran
        is_by_rank = grouping == "engine"
        self._table = None if is_by_rank else table(outputs)
        if self._table:
            outputs = {rank: output.without_value() for rank, output in outputs.items()}
        self._folds: list[Fold] = []
        for part in _parts(outputs, grouping):
            self._folds += folded(part, with_equals=not is_by_rank)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}

    # As text

    def text(self) -> str:
        """Return all of it as plain text."""
        lines: list[str] = []
        for fold in self._folds:
            lines += _labelled(fold.ranks, [*_texts(fold.output)])
        lines += _table_lines(self._table) if self._table else []
        lines += [*self._ran.notes, *self._ran.error.splitlines()]
        lines += [f"({self._ran.cost})"] if self._ran.cost else []
        return "\n".join(lines)

    # As HTML

    def html(self) -> str:
        """Return all of it as HTML; what ranks print cannot be taken for HTML."""
        parts = [STYLE]
        for fold in self._folds:
            parts.append(_fold_html(rank_names(fold.ranks), "".join(_html_parts(fold.output))))
        parts += [_table_html(self._table)] if self._table else []
        parts += [_framed("note", note) for note in self._ran.notes]
        parts += [_framed("report", self._ran.error)] if self._ran.error else []
        if self._ran.cost:
            parts.append(f'<div class="distlab-cost">{escape(self._ran.cost)}</div>')
        return "\n".join(parts)


def _parts(outputs: Mapping[int, RankOutput], grouping: str) -> Sequence[Mapping[int, RankOutput]]:
    """Return the outputs as they are, or in three parts by type.

    They are in parts, too, if all ranks have printed the same and only the values differ.
    """
    have_printed_alike = len({output.without_value().key() for output in outputs.values()}) == 1
    if grouping == "engine" or not (grouping == "type" or have_printed_alike):
        return [outputs]
    parts = zip(*(output.by_type() for output in outputs.values()), strict=True)
    return [dict(zip(outputs, part, strict=True)) for part in parts]


def _framed(kind: str, text: str) -> str:
    return f'<div class="distlab-{kind}"><pre>{escape(text)}</pre></div>'


def _fold_html(name: str, shown: str) -> str:
    return f'<div class="distlab-fold"><div class="distlab-ranks">{name}</div>{shown}</div>'


def _labelled(ranks: Sequence[int], lines: Sequence[str]) -> list[str]:
    name = rank_names(ranks)
    if len(lines) == 1:
        return [f"{name}: {lines[0]}"]
    return [f"{name}:", *(f"  {line}" for line in lines)]


def _texts(output: RankOutput) -> Iterator[str]:
    yield from output.text.splitlines()
    for data in output.bundles:
        yield from str(data.get("text/plain", "")).splitlines()


def _html_parts(output: RankOutput) -> Iterator[str]:
    if output.text:
        yield f"<pre>{escape(output.text)}</pre>"
    yield from map(_html_of, output.bundles)


def _html_of(data: Bundle) -> str:
    if "text/html" in data:
        return str(data["text/html"])
    if "image/svg+xml" in data:
        return str(data["image/svg+xml"])
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{_base64(data["image/png"])}">'
    return f"<pre>{escape(str(data.get('text/plain', '')))}</pre>"


def _base64(image: bytes | str) -> str:
    """Return an image as text; some libraries give bytes, others have encoded them."""
    return image if isinstance(image, str) else b64encode(image).decode()


def _table_lines(shown: Table) -> Iterator[str]:
    cells = [
        [f"{value}{'*' if is_odd else ' '}" for value, is_odd in _marked(values, shown)]
        for _, values in shown.rows
    ]
    names = [rank_names(ranks) for ranks, _ in shown.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield shown.title
    for name, row in [*zip(names, cells, strict=True)][:MAX_ROWS]:
        values = "  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True))
        yield f"  {name.ljust(max(map(len, names)))}  {values}".rstrip()
    yield from _left_out(shown)


def _marked(values: Sequence[str], shown: Table) -> Iterator[tuple[str, bool]]:
    """Yield a row's values, each with True if most other ranks have another one."""
    for value, usual in zip(values, shown.usual, strict=True):
        yield value, bool(usual) and value != usual


def _left_out(shown: Table) -> Iterator[str]:
    if shown.num_hidden:
        yield f"  … and {shown.num_hidden:,} more elements"
    if len(shown.rows) > MAX_ROWS:
        yield f"  … and {len(shown.rows) - MAX_ROWS} more rows"


def _table_html(shown: Table) -> str:
    rows = []
    for ranks, values in shown.rows[:MAX_ROWS]:
        cells = "".join(
            f'<td class="differs">{value}</td>' if is_odd else f"<td>{value}</td>"
            for value, is_odd in _marked(values, shown)
        )
        rows.append(f"<tr><th>{rank_names(ranks)}</th>{cells}</tr>")
    more = "".join(f'<div class="distlab-ranks">{line}</div>' for line in _left_out(shown))
    body = f'<table class="distlab">{"".join(rows)}</table>'
    return _fold_html(escape(shown.title), f"{body}{more}")


class Picture:
    """A figure for ``display``, as SVG; a terminal shows its title."""

    def __init__(self, figure: Figure) -> None:
        self._figure = figure

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        file = io.StringIO()
        self._figure.savefig(file, format="svg")
        title = self._figure.get_suptitle()
        hint = "plain text cannot show it; %cluster --lanes FILE.png writes it to a file"
        # As wide as the page: notebooks do not scale a picture that says its size.
        svg = re.sub(r'width="\S+pt" height="\S+pt"', 'width="100%"', file.getvalue(), count=1)
        return {"text/plain": f"{title}: {hint}", "image/svg+xml": svg}
