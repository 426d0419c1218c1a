"""Hooks for mkdocs: the site consists of the repository's Markdown files, at the same paths.

Links between files therefore work unchanged on the site. mkdocs.yml names this file as
a hook; ``make docs`` runs it.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.course import anchor

if TYPE_CHECKING:  # not at run time, since the tests do without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SHOWN = ("*.md", "docs/*.md", "docs/*.png", "docs/images/*", "phase*/*.md", "phase*/figures/*")
NOT_SHOWN = ("CLAUDE.md",)  # it only points to AGENTS.md
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Give headings the same anchors as on GitHub."""
    config.mdx_configs["toc"] = {"slugify": lambda text, _: anchor(text), "permalink": True}
    return config


def on_files(files: "Files", *, config: "MkDocsConfig") -> "Files":
    """Replace the files in docs/ with the repository's pages; keep the theme's files."""
    from mkdocs.structure.files import Files

    theirs = [file for file in files if not file.src_uri.endswith((".md", ".png"))]
    return Files([*theirs, *(_file(path, config) for path in shown())])


def shown() -> Iterator[Path]:
    """Yield the files of the site, as paths in the repository."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            if path.name not in NOT_SHOWN:
                yield path.relative_to(ROOT)


def _file(path: Path, config: "MkDocsConfig") -> "File":
    from mkdocs.structure.files import File

    return File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path))


def on_page_markdown(text: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Convert GitHub's Markdown to mkdocs' dialect."""
    return for_mkdocs(text, Path(page.file.src_uri))


def for_mkdocs(text: str, path: Path) -> str:
    """Convert the few constructs of a page that GitHub and mkdocs treat differently.

    Args:
        text: GitHub's Markdown.
        path: Path of the page in the repository.
    """
    lines: list[str] = []
    for is_code, block in groupby(_with_kinds(text), key=itemgetter(0)):
        words = "\n".join(line for _, line in block)
        if not is_code:  # a link may go over two lines
            words = LINK.sub(lambda match: _link(match, path), words)
            words = words.replace("<details>", '<details markdown="1">')
        for line in words.split("\n"):
            is_item = not is_code and ITEM.match(line)
            if is_item and lines and lines[-1].strip() and not _is_in_list(lines):
                lines.append("")
            lines.append(line)
    return "\n".join(lines) + "\n"


def _with_kinds(text: str) -> Iterator[tuple[bool, str]]:
    """Yield each line, with True if it is a part of a fenced block of code."""
    is_inside = False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        yield is_inside or is_fence, line
        is_inside ^= is_fence


def _is_in_list(lines: list[str]) -> bool:
    """Return True if the last paragraph is a list item."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False


def _link(link: re.Match[str], path: Path) -> str:
    """Keep a link to a page of the site; replace a link to any other file with its text.

    A broken link is kept, so that mkdocs complains.
    """
    words, target = link.groups()
    file = (ROOT / path.parent / target.partition("#")[0]).resolve()
    if "://" in target or target.startswith("#") or not file.exists():
        return link[0]
    return link[0] if file.relative_to(ROOT) in shown() else words
