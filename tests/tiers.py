"""The two tiers of tests: ``make test`` runs the first, and ``make test-all`` runs both.

The first tier holds the tests that anyone should run after a change, with one wrong answer per
task. The second adds slow tests: whole programs on real processes, kill campaigns, comparisons with
other libraries and with published or quoted figures, and all other answers of the bank. A file that
is named on the command line always runs in full.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Files and folders of the second tier.
SECOND_TIER = (
    "lab/grade/test_pretended_gpus.py",
    "lab/grade/test_slow_machines.py",
    "lab/grade/test_stopped_and_killed.py",
    "lab/notebook/test_engines.py",
    "lab/production/test_production_ends.py",
    "lab/production/test_production_evaluation.py",
    "lab/production/test_production_failures.py",
    "lab/production/test_production_gpus.py",
    "lab/production/test_production_loading.py",
    "lab/production/test_production_resume.py",
    "lab/production/test_production_stragglers.py",
    "lab/production/test_production_strategies.py",
    "lab/sim/collectives/test_fidelity.py",
    "lab/sim/hardware/test_published.py",
    "lab/sim/test_against_gloo.py",
    "lab/sim/test_in_pytorch.py",
    "lab/sim/test_in_pytorch_34.py",
    "lab/sim/test_museum.py",
    "lab/sim/test_torch_suite.py",
    "lab/sim/test_tour.py",
    "lab/test_bench.py",
    "lab/test_challenge_anywhere.py",
    "lab/test_chaos.py",
    "lab/test_chaos_training.py",
    "lab/test_comm_hook.py",
    "lab/test_demo.py",
    "lab/test_deployment.py",
    "lab/test_deployment_image.py",
    "lab/test_deployment_monitoring.py",
    "lab/test_deployment_preflight.py",
    "lab/test_deployment_processes.py",
    "lab/test_dry_run.py",
    "lab/test_elastic.py",
    "lab/test_explore.py",
    "lab/test_gpu_script.py",
    "lab/test_guidelines.py",
    "lab/test_handout.py",
    "lab/test_heartbeats.py",
    "lab/test_launch_scripts.py",
    "lab/test_launch_start.py",
    "lab/test_learner_processes.py",
    "lab/test_lend_command.py",
    "lab/test_lesson_programs.py",
    "lab/test_lost_workers.py",
    "lab/test_memory_pictures.py",
    "lab/test_messages_phase2.py",
    "lab/test_methods.py",
    "lab/test_mnist_mpi.py",
    "lab/test_mpi.py",
    "lab/test_own_phases.py",
    "lab/test_plan.py",
    "lab/test_quoted_phase2.py",
    "lab/test_quoted_phase3.py",
    "lab/test_real_disks.py",
    "lab/test_results.py",
    "lab/test_seed_commands.py",
    "lab/test_sharding.py",
    "lab/test_shared_memory.py",
    "lab/test_stoppable_run.py",
    "lab/test_torchvision_repair.py",
    "lab/test_train_command.py",
    "lab/test_two_hosts.py",
    "wrong_answers/test_mutation.py",
    "wrong_answers/test_rebase.py",
)
BANK = "wrong_answers/test_bank.py"
_TASK_OF_THE_BANK = re.compile(r"test_bank\.py::\w+\[([\d.]+) ")


def add_option(parser: pytest.Parser) -> None:
    """Add the option ``--all``, which also runs the second tier."""
    parser.addoption("--all", action="store_true", help="run the tests of both tiers")


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Return whether a file or folder is skipped, because only the first tier is to run."""
    listed = path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix() in SECOND_TIER
    return listed and not config.getoption("--all") and not _is_named(path, config)


def leave_out_answers(items: list[pytest.Item], config: pytest.Config) -> None:
    """Keep only one test of the bank per task if only the first tier runs."""
    if config.getoption("--all") or _is_named(TESTS / BANK, config):
        return
    seen: set[str] = set()
    kept, left_out = [], []
    for item in items:
        task = _TASK_OF_THE_BANK.search(item.nodeid)
        (left_out if task and task[1] in seen else kept).append(item)
        seen |= {task[1]} if task else set()
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _is_named(path: Path, config: pytest.Config) -> bool:
    """Return whether a file, or a test in it, is named on the command line."""
    files = (config.invocation_params.dir / word.split("::")[0] for word in config.args)
    return path in [file.resolve() for file in files]
