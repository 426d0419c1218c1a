"""One shell for all tests of notebooks, and ranks for each of them."""

import sys
from collections.abc import Iterator

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from notebooks import Notebook


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    main = sys.modules["__main__"]  # which a shell replaces
    shell = InteractiveShell.instance()
    shell.display_pub = CapturingDisplayPublisher()
    shell.run_line_magic("load_ext", "distlab")
    yield shell
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@pytest.fixture
def notebook(shell: InteractiveShell) -> Iterator[Notebook]:
    notebook = Notebook(shell)
    notebook.run("%cluster 4")
    yield notebook
    notebook.run("%cluster --off")
    shell.user_ns.clear()  # shell.reset() would also collect garbage, for a second
    shell.init_user_ns()
