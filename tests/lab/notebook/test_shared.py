"""What ranks replace in torch, which they share with each other and with the notebook."""

import pytest
import torch
import torch.distributed as dist
from notebooks import Notebook
from torch.nn import functional

ALL_REDUCE = dist.all_reduce
LOG = "def logged(x): pass\nif rank == 0: dist.all_reduce = logged"


@pytest.mark.parametrize("end", ["%cluster --off", "%cluster 2"])
def test_a_function_that_a_rank_replaces_is_told_and_restored(notebook: Notebook, end: str) -> None:
    notebook.run("%%ranks\noriginal = dist.all_reduce")
    shown = notebook.run(f"%%ranks\n{LOG}")
    assert shown.startswith("torch.distributed.all_reduce was replaced, for all ranks")
    assert "%cluster --off restores it" in shown
    assert "replaced" not in notebook.run("%%ranks\n1")  # once
    assert "replaced" in notebook.run(f"%%ranks\n{LOG}")
    assert "replaced" not in notebook.run("%%ranks\ndist.all_reduce = original")
    notebook.run(f"%%ranks\n{LOG}")
    notebook.run(end)
    assert dist.all_reduce is ALL_REDUCE
    notebook.run("%cluster 2")
    assert "replaced" not in notebook.run("%%ranks\n1")


def test_methods_and_deleted_names_are_restored(notebook: Notebook) -> None:
    """Tensor inherits sum: what shadows it goes."""
    relu, add, inherited = functional.relu, torch.Tensor.__add__, torch.Tensor.sum
    cell = "if rank == 1:\n    T = torch.Tensor\n    T.sum = T.__add__ = lambda x: 5"
    shown = notebook.run(f"%%ranks\n{cell}\n    del torch.nn.functional.relu")
    assert "torch.nn.functional.relu were replaced" in shown
    assert "torch.Tensor.sum" in shown
    assert "torch.Tensor.__add__" in shown
    notebook.run("%cluster --off")
    assert (functional.relu, torch.Tensor.__add__) == (relu, add)
    assert torch.Tensor.sum is inherited
    assert "sum" not in vars(torch.Tensor)


def test_what_the_notebooks_own_cells_replace_stays(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run("%%ranks\n1")
    monkeypatch.setattr(functional, "relu", own := lambda x: x)
    assert "replaced" not in notebook.run("%%ranks\n1")
    notebook.run("%cluster --off")
    assert functional.relu is own


def test_what_a_library_replaces_while_a_cell_fails_is_told(notebook: Notebook) -> None:
    patch = "from unittest import mock\npatch = mock.patch('torch.relu')"
    shown = notebook.run(f"%%ranks\n{patch}\nif rank == 2:\n    patch.start()\n    1 / 0")
    assert "torch.relu was replaced" in shown
    assert "ZeroDivisionError" in shown


@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
def test_what_torch_and_the_simulator_do_is_no_change(
    notebook: Notebook, semantics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run(f"%cluster 2 --semantics {semantics}")
    cell = "model = torch.nn.Linear(2, 2).to(device)\n"
    cell += "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
    cell += "ddp(torch.ones(1, 2, device=device)).sum().backward()"
    assert "replaced" not in notebook.run(f"%%ranks\n{cell}")
    assert not notebook.has_failed
    monkeypatch.setattr(torch, "name_that_is_new", 1, raising=False)
    assert notebook.run("%rank 0 torch.name_that_is_new") == "rank 0: 1"


def test_a_name_may_hold_what_cannot_be_compared(notebook: Notebook) -> None:
    shown = notebook.run("%%ranks 0\nimport numpy\ntorch.relu = torch.pi = numpy.ones(3)")
    assert "torch.relu" in shown
    notebook.run("%%ranks 0\ntorch.relu = numpy.ones(3)")
    assert "torch.relu was replaced" in notebook.run("%%ranks 0\ntorch.relu = numpy.zeros(3)")
