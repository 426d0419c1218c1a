"""Judges give NCCL only tensors that are on the rank's GPU; here, the GPUs are pretended."""

import pytest
from pretended_gpus import NUM_GPUS
from processes import ROOT, FreshPytest

# All tasks with a test in a world of one rank, and 4.18, whose worlds are simulated on one GPU.
ON_ONE = "1.9 or 1.11 or 1.12 or 1.13 or 2.3 or 2.4 or 3.11 or 4.18"
# Some of the tasks with a test in processes; the judges of the others still send CPU tensors.
ON_SEVERAL = "1.4 or 1.6 or 1.7 or 1.11 or 1.12 or 1.13 or 2.2 or 2.3"
ON_SEVERAL += " or 3.1 or 3.2 or 3.3 or 3.4 or 3.5 or 3.7 or 3.11 or 4.9 or 4.10 or 4.11"


@pytest.mark.slow
@pytest.mark.parametrize(("num_gpus", "tasks"), [(1, ON_ONE), (8, ON_SEVERAL)])
def test_solutions_pass_on_nccl(fresh_pytest: FreshPytest, num_gpus: int, tasks: str) -> None:
    suites = [ROOT / f"tests/test_phase{phase}.py" for phase in (1, 2, 3, 4)]
    ended = fresh_pytest(
        *(*suites, "-q", "-p", "pretended_gpus", "--impl", "solution", "--backend", "nccl"),
        *("-k", tasks),
        **{NUM_GPUS: str(num_gpus), "PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tests/lab"},
    )
    last = ended.stdout.splitlines()[-1]
    assert "passed" in last, ended.stdout + ended.stderr
    assert not {"wrong", "error", "hang", "crash"} & {*last.replace(",", "").split()}, ended.stdout
