"""import_torchvision repairs a torchvision that lacks its extension, and leaves others alone."""

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distlab.torchvision_repair import import_torchvision


def run_fresh(code: str) -> str:
    """Run ``code`` in a Python that has imported nothing yet; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_everything_runs_after_the_repair_even_if_an_import_failed_before() -> None:
    printed = run_fresh("""
        import contextlib, gc, torch
        with contextlib.suppress(RuntimeError):
            import torchvision
        from distlab.torchvision_repair import import_torchvision
        repaired = import_torchvision()
        gc.collect()  # the declarations must outlive the call

        import torchvision
        from torchvision.transforms import v2
        flip = v2.Compose([v2.RandomHorizontalFlip(p=1), v2.ToDtype(torch.float32, scale=True)])
        data = torchvision.datasets.FakeData(2, (3, 32, 32), transform=v2.ToImage())
        model = torchvision.models.resnet18(num_classes=3).eval()
        print(tuple(model(flip(data[0][0]).unsqueeze(0)).shape))
        print(repaired is import_torchvision() is torchvision, torch.ops.torchvision.nms)
    """)
    assert printed == "(1, 3)\nTrue torchvision.nms"


def test_a_simulated_program_imports_torchvision_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import torchvision\nprint(torchvision.models.resnet18.__name__)\n")
    printed = run_fresh(f"""
        import sys
        from pathlib import Path
        from distlab.sim import Cluster, Options
        from distlab.sim.script import run_script
        before = [*sys.meta_path]
        run_script(Path({str(script)!r}), [], 2, Cluster(1, 2), Options())
        assert sys.meta_path == before
    """)
    assert printed == "resnet18\nresnet18"


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA major versions differ"), ModuleNotFoundError("torchvision")]
)
def test_other_import_errors_pass_through(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", fail)
        with pytest.raises(type(error)) as raised:
            import_torchvision()
    assert raised.value is error
