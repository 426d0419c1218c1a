"""``distlab sim`` runs a script on every rank, as torchrun does, and then prints a summary."""

import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from commands import distlab

from distlab.sim import Cluster, Options, RankError, SimulationError
from distlab.sim.script import names_gpus, run_script


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes scripts, which import torch and join a group."""

    def to_file(text: str, name: str = "program.py") -> Path:
        head = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        path = tmp_path / name
        path.write_text(head + textwrap.dedent(text))
        return path

    return to_file


def run(script: Path, *arguments: str, ranks: int = 2) -> None:
    run_script(script, arguments, ranks, Cluster(1, ranks), Options())


# The script's world


def test_a_script_is_main_and_sees_its_own_arguments(write, capsys) -> None:
    script = write("""
        import os, sys
        if __name__ == "__main__":
            print(dist.get_rank(), sys.argv[1:], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
            assert sys.argv[0] == __file__
            assert not torch.cuda.is_available()
        """)
    run(script, "--lr", "0.1")
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "0 ['--lr', '0.1'] 0 2",
        "1 ['--lr', '0.1'] 1 2",
    ]


@pytest.mark.parametrize("given", [None, "0,1"])
def test_the_variable_of_visible_gpus_is_the_users(given, tmp_path, monkeypatch, capfd) -> None:
    """CUDA itself, like what the script starts, sees none of the machine's GPUs."""
    name, script = "CUDA_VISIBLE_DEVICES", tmp_path / "script.py"
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    shown = f"echo child=${{{name}-unset}}"
    script.write_text(
        "import os, subprocess\n"
        f"print(os.environ.get('{name}'), flush=True)\n"
        f"subprocess.run(['sh', '-c', '{shown}'])\n"
    )
    run(script, ranks=1)
    assert capfd.readouterr().out == f"{given}\nchild=\n"
    os.system(shown)
    assert capfd.readouterr().out == f"child={given or 'unset'}\n"


def test_globals_and_classes_belong_to_one_rank(write) -> None:
    run(
        write("""
        class Mine:
            rank = dist.get_rank()
        count = 0
        def add():
            global count
            count += 1
        for _ in range(5):
            add()
            dist.barrier()
        assert count == 5
        assert Mine.rank == dist.get_rank()
        """)
    )


def test_modules_of_the_program_belong_to_one_rank(write, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "state.py").write_text("rank = None\n")
    # Ranks wait for each other while they import this one.
    (tmp_path / "joined.py").write_text(
        "import torch.distributed as dist\ndist.barrier()\nRANK = dist.get_rank()\n"
    )
    before = {*sys.modules}
    run(
        write("""
        import pickle
        import joined
        from package import state
        state.rank = dist.get_rank()
        class Mine:
            pass
        dist.barrier()
        import package.state
        assert package.state is state
        assert package.state.rank == joined.RANK == dist.get_rank()
        assert pickle.loads(pickle.dumps(Mine)) is Mine
        """),
        ranks=3,
    )
    assert not {"package", "package.state", "joined"} & ({*sys.modules} - before)


def test_a_module_that_was_imported_before_is_not_the_ranks_one(write, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("times = 0\n")
    spec = importlib.util.spec_from_file_location("counted", tmp_path / "counted.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["counted"] = ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    try:
        run(write("import counted\ncounted.times += 1\ndist.barrier()\nassert counted.times == 1"))
        assert sys.modules["counted"] is ours
        assert ours.times == 0
    finally:
        del sys.modules["counted"]


# Scripts that start their own ranks

STARTERS = {
    "spawn": "mp.spawn(main, args=(3,), nprocs=3)",
    "spawn and join": "mp.spawn(main, args=(3,), nprocs=3, join=False).join()",
    "Process": """
    parts = [mp.Process(target=main, args=(rank, 3)) for rank in range(3)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    assert [part.exitcode for part in parts] == [0, 0, 0]
    """,
    "Process of a context": """
    context = mp.get_context("spawn")
    parts = [context.Process(target=main, args=(rank, 3)) for rank in range(3)]
    [part.start() for part in parts]
    while any(part.is_alive() for part in parts):
        pass
    """,
    "each its variables": """
    processes = []
    for rank in range(3):
        os.environ["RANK"] = str(rank)
        processes.append(mp.Process(target=main, args=("RANK", 3)))
        processes[-1].start()
    for process in processes:
        process.join()
    """,
    "class of processes": """
    for rank in range(3):
        Worker(rank).start()
    """,
}


@pytest.mark.parametrize("start", STARTERS.values(), ids=STARTERS)
def test_processes_that_a_script_starts_become_the_ranks(
    tmp_path, start: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")  # so that what the script sets is undone
    script = tmp_path / "starts.py"
    script.write_text(f"""
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
count = 0
class Sum:
    pass
def main(rank, size):
    global count
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
    rank = int(os.environ.get(rank, rank)) if isinstance(rank, str) else rank
    dist.init_process_group("gloo", rank=rank, world_size=size)
    x = torch.ones(1) * rank
    dist.all_reduce(x)
    count += 1
    sums = [None] * size
    dist.all_gather_object(sums, Sum())
    assert all(type(each) is Sum for each in sums)
    print(rank, x.item(), count)
class Worker(mp.Process):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
    def run(self):
        main(self.rank, 3)
if __name__ == "__main__":
    print("once")
{textwrap.indent(textwrap.dedent(start), "    ")}
""")
    assert distlab("sim", "--ranks", 8, script) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "once"
    assert sorted(lines[1:4]) == ["0 3.0 1", "1 3.0 1", "2 3.0 1"]
    assert "3 ranks" in printed
    assert "starts.py started 3 ranks itself, whatever --ranks 8 says." in printed
    assert "main function" not in printed


def test_a_module_beside_a_script_may_start_its_ranks(tmp_path, capsys) -> None:
    (tmp_path / "starter.py").write_text("""
import torch.distributed as dist
import torch.multiprocessing as mp
def join(rank, main):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=2)
    main()
def launch(main):
    mp.spawn(join, args=(main,), nprocs=2)
""")
    script = tmp_path / "main.py"
    script.write_text("""
import os
import torch.distributed as dist
import starter
def main():
    print("rank", dist.get_rank())
if __name__ == "__main__":
    starter.launch(main)
""")
    assert distlab("sim", "--ranks", 4, script) == 0
    assert sorted(capsys.readouterr().out.splitlines()[:2]) == ["rank 0", "rank 1"]


def test_forked_ranks_have_the_variables_of_the_first_process(tmp_path, capsys) -> None:
    script = tmp_path / "forks.py"
    script.write_text("""
import multiprocessing as mp
import torch.distributed as dist
settings = None
print("loaded")
def main(rank, results):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=2)
    dist.barrier()
    results.put((rank, settings, later))
if __name__ == "__main__":
    settings, later = "set", "also"
    results = mp.Queue()
    parts = [mp.Process(target=main, args=(rank, results)) for rank in range(2)]
    [part.start() for part in parts]
    print(sorted(results.get() for _ in parts))
    [part.join() for part in parts]
""")
    run(script)
    assert capsys.readouterr().out == "loaded\n[(0, 'set', 'also'), (1, 'set', 'also')]\n"


def test_each_rank_has_its_own_copies_of_arguments_and_variables(tmp_path, capsys) -> None:
    script = tmp_path / "copies.py"
    script.write_text("""
import multiprocessing as mp
import torch
import torch.distributed as dist
counts = None
def main(rank, model, x):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=2)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    x += 1
    counts["calls"] += 1
    dist.barrier()
    print(rank, model.weight.grad.tolist(), x.item(), counts)
class Main:
    def __call__(self, *args):
        main(*args)
if __name__ == "__main__":
    counts, model, x = {"calls": 0}, torch.nn.Linear(2, 1), torch.zeros(1)
    parts = [mp.Process(target=Main(), args=(rank, model, x)) for rank in range(2)]
    for part in parts:
        part.start()
        assert part.is_alive()
    [part.join() for part in parts]
""")
    run(script)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "0 [[1.0, 1.0]] 1.0 {'calls': 1}",
        "1 [[2.0, 2.0]] 1.0 {'calls': 1}",
    ]


BOTH = """
import os
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank, size):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=size)
    print(dist.get_rank(), dist.get_world_size(), flush=True)
if __name__ == "__main__":
    print("once")
    if {condition}:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        mp.spawn(main, args=(2,), nprocs=2)
"""


@pytest.mark.parametrize(
    ("condition", "arguments", "lines"),
    [
        ("'RANK' in os.environ", [], ["0 3", "1 3", "2 3", "once", "once", "once"]),
        ("'launched' in sys.argv", ["launched"], ["0 3", "1 3", "2 3", "once", "once", "once"]),
        ("'launched' in sys.argv", [], ["0 2", "1 2", "once"]),
    ],
)
def test_a_script_that_can_do_both_starts_ranks_unless_it_asks_for_its_place_before(
    tmp_path: Path, capfd, condition: str, arguments: list[str], lines: list[str]
) -> None:
    script = tmp_path / "both.py"
    script.write_text(BOTH.format(condition=condition))
    run(script, *arguments, ranks=3)
    assert sorted(capfd.readouterr().out.splitlines()) == lines


def test_a_script_may_read_its_node_s_number_where_somebody_has_set_it(
    tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "node.py"
    script.write_text(BOTH.format(condition="int(os.environ['RANK'])"))
    with pytest.raises(RankError, match="If it asks for the number of its node, set that: RANK=0"):
        run(script, ranks=2)
    monkeypatch.setenv("RANK", "0")
    capfd.readouterr()
    run(script, ranks=3)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 2", "1 2", "once"]


ONE_PER_GPU = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", "tcp://127.0.0.1:29500", rank=rank, world_size=size)
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    print(rank, x.item(), torch.cuda.device_count())
if __name__ == "__main__":
    count = torch.cuda.device_count()
    print(torch.cuda.is_available(), count, torch.accelerator.current_accelerator())
    mp.spawn(main, args=(count,), nprocs=count)
"""


def test_a_script_that_starts_a_rank_per_gpu_sees_as_many_as_ranks_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "one_per_gpu.py"
    script.write_text(ONE_PER_GPU)
    assert distlab("sim", "--semantics", "nccl", "--ranks", 2, script) == 0
    assert sorted(capsys.readouterr().out.splitlines()[:3]) == ["0 2.0 8", "1 2.0 8", "True 2 cuda"]
    assert not torch.cuda.is_available()


def test_the_process_that_starts_the_ranks_cannot_use_their_gpus(tmp_path: Path) -> None:
    script = tmp_path / "uses.py"
    script.write_text(
        ONE_PER_GPU.replace("    count = ", "    torch.cuda.set_device(0)\n    count = ")
    )
    with pytest.raises(RuntimeError, match="only the threads of a simulated rank have GPUs"):
        run_script(script, [], 2, Cluster.preset("dgx-h100"), Options(semantics="nccl"))


SPAWN = """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank, size):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=size)
    if rank == 1 and "fails" in sys.argv:
        raise ValueError("why")
"""


@pytest.mark.parametrize(
    ("lines", "arguments", "report"),
    [
        (
            "mp.spawn(main, args=(2,), nprocs=2)",
            [],
            "put the lines that start them under if __name",
        ),
        ("if __name__ == '__main__':\n    mp.spawn(main, nprocs=0)", [], "started no ranks"),
        (
            "if __name__ == '__main__':\n    main(0, 2)\n    mp.spawn(main, args=(2,))",
            [],
            "the script's first process joins a group itself",
        ),
        (
            "if __name__ == '__main__':\n    mp.spawn(main, args=(4,), nprocs=4)",
            [],
            "4 ranks need as many GPUs, but",
        ),
        (
            "if __name__ == '__main__':\n"
            "    try:\n        mp.spawn(main, args=(2,), nprocs=2)\n"
            "    except Exception:\n        pass",
            ["fails"],
            "rank 1 of 2 raised ValueError: why",
        ),
        (
            "if __name__ == '__main__':\n    mp.spawn(main, args=(3,), nprocs=2)",
            [],
            "rank 0 of 2 calls init_process_group(rank=0, world_size=3)",
        ),
    ],
)
def test_ranks_that_cannot_start_are_refused_in_one_line(
    tmp_path: Path, lines: str, arguments: list[str], report: str
) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(f"{SPAWN}{lines}\n")
    with pytest.raises(SimulationError, match=re.escape(report)):
        run(script, *arguments)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("dist.init_process_group('gloo')", "environment variable RANK expected"),
        (
            "dist.init_process_group('gloo', rank=rank, world_size=2)",
            "environment variable MASTER_ADDR expected",
        ),
        (
            "dist.init_process_group('gloo', 'tcp://127.0.0.1:29500', world_size=2)",
            "tcp:// rendezvous: rank parameter missing",
        ),
        (
            "torch.distributed.device_mesh.init_device_mesh('cpu', (2,))",
            "environment variable RANK expected",
        ),
    ],
)
def test_ranks_without_a_launcher_need_what_torch_needs(
    tmp_path: Path, call: str, expected: str
) -> None:
    script = tmp_path / "needs.py"
    script.write_text(f"""
import torch.distributed.device_mesh
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank):
    {call}
if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
""")
    with pytest.raises(SimulationError, match=re.escape(expected)):
        run(script)


def test_a_process_that_a_rank_starts_cannot_join_the_ranks(write, capfd) -> None:
    run(
        write("""
        import multiprocessing as mp
        def main():
            dist.init_process_group("gloo", rank=0, world_size=1)
        if dist.get_rank() == 0:
            process = mp.get_context("fork").Process(target=main)
            process.start()
            process.join()
            assert process.exitcode == 1
        import os; os.environ["RANK"]
        """)
    )
    assert (
        "a process that rank 0 has started cannot join the simulated ranks"
        in capfd.readouterr().err
    )


def test_a_rank_cannot_start_ranks(write) -> None:
    script = write("""
        import os
        import torch.multiprocessing as mp
        os.environ["RANK"]
        mp.spawn(print, nprocs=2)
        """)
    with pytest.raises(RankError, match=r"rank 0 cannot start processes by torch\.multiproc"):
        run(script, ranks=1)


@pytest.mark.parametrize("call", ["torch.cuda.set_device(0)", "torch.ones(1, device='cuda')"])
def test_a_rank_that_selects_a_gpu_is_told_that_it_has_none(write, call: str) -> None:
    with pytest.raises(RankError, match=r"rank 0 has no GPU to select: .* compute on the CPU"):
        run(write(call), ranks=1)


def test_remote_calls_are_refused(write) -> None:
    script = write("from torch.distributed import rpc; rpc.init_rpc('a', rank=0, world_size=1)")
    with pytest.raises(RankError, match=r"rank 0 cannot use torch\.distributed\.rpc: .* torchrun"):
        run(script, ranks=1)


@pytest.mark.parametrize("text", ["", "raise ValueError", "import sys; sys.path.append('x')"])
def test_the_process_is_afterwards_as_before(write, text: str) -> None:
    before = sys.argv, list(sys.path), sys.modules["__main__"], dict(os.environ)
    try:
        run(write(text))
    except RankError:
        assert "raise" in text
    assert (sys.argv, sys.path, sys.modules["__main__"], dict(os.environ)) == before


# How a run ends


def test_a_rank_out_of_memory_gets_one_report_and_the_lines_of_the_program(write) -> None:
    script = write("""
        layer = torch.nn.Linear(100, 100, bias=False)
        layer.weight.grad = torch.ones(100, 100)
        torch.optim.AdamW(layer.parameters()).step()
        """)
    options = Options(has_devices=True, capacity_bytes=150_000)
    with pytest.raises(RankError) as failed:
        run_script(script, (), 2, Cluster(1, 2), options)
    assert failed.value.exception == "OutOfMemory"
    lines = str(failed.value).splitlines()
    assert lines[0].startswith("rank 0 of 2 raised OutOfMemory: out of memory in zeros_like: ")
    assert str(failed.value).count("out of memory") == 1
    files = [line for line in lines if line.startswith("  File")]
    assert str(script) in files[0]
    assert not any("distlab" in file for file in files)


@pytest.mark.parametrize("end", ["exit()", "import sys; sys.exit(0)", "raise SystemExit"])
def test_leaving_with_success_ends_a_rank_and_no_more(write, end: str, capsys) -> None:
    run(write(f"if dist.get_rank(): {end}\nprint('still here')"))
    assert capsys.readouterr().out == "still here\n"


def test_a_script_that_is_no_python_is_refused_with_the_line(write) -> None:
    with pytest.raises(SimulationError, match=r"program.py cannot be run\n.*line 4") as failed:
        run(write("x = = 3"))
    assert "x = = 3" in str(failed.value)


# The command


def test_the_command_prints_the_output_then_the_summary_and_writes_files(
    write, tmp_path: Path, capsys
) -> None:
    script = write("""
        import sys
        x = torch.ones(1000)
        dist.all_reduce(x)
        print("sum", x[0].item(), sys.argv[1:], "--ranks" in sys.argv)
        """)
    names = {"trace": "t.json", "links": "l.csv", "plot": "p.png", "gantt": "g.svg"}
    files = [part for key, name in names.items() for part in (f"--{key}", tmp_path / name)]
    options = ["--cluster", "p4d", "--ranks", 3, "--fault", "slow_rank 1 2", "--eager-bytes", 0]
    assert distlab("sim", *options, *files, script, "--ranks", "7", "-x") == 0
    printed = capsys.readouterr()
    assert printed.out.count("sum 3.0 ['--ranks', '7', '-x'] True\n") == 3
    report = printed.out.partition("\n\n")[2]
    assert report.startswith("simulated, preset p4d, not measured\n3 ranks on 1 x 8 GPUs")
    assert "rank 1 computes 2 times slower" in report
    assert printed.err == ""
    for name in names.values():
        assert (tmp_path / name).stat().st_size > 500
        assert f"{tmp_path / name}: " in report


def test_assumed_numbers_are_listed_without_a_script(capsys) -> None:
    assert distlab("sim", "--assumed", "--cluster", "p4d") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("assumed in p4d (--cluster chooses another):\n")
    assert "  latency_s = 5.64286e-06 (assumed: as dgx-a100: the same board)\n" in printed
    assert distlab("sim", "--cluster", "p4d") == 2
    assert capsys.readouterr().err == "distlab sim: Missing argument 'SCRIPT'.\n"


@pytest.mark.parametrize("option", ["--ranks 4", "--ranks=4", "--strict"])
def test_an_option_of_the_command_behind_the_script_is_explained_before_anything_runs(
    write, option: str, capsys
) -> None:
    script, name = write("print('ran')"), option.replace("=", " ").split()[0]
    assert distlab("sim", script, "--kib", 4, *option.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"{name} comes after {script} and would be the script's: put it before" in printed.err
    assert f"distlab sim {script} -- --kib 4 {option}" in printed.err, "if it is the script's own"


def test_what_stands_behind_two_dashes_is_the_script_s_whatever_its_name(write, capsys) -> None:
    script = write("import sys\nprint(sys.argv[1:])")
    assert distlab("sim", "--ranks", 1, script, "--", "--ranks", "7", "--", "x") == 0
    assert capsys.readouterr().out.startswith("['--ranks', '7', '--', 'x']\n")


def settings(*options: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command; return the settings that its summary lists."""
    assert distlab("sim", "--ranks", 2, *options) == 0
    _, _, listed = capsys.readouterr().out.partition("\nset:\n")
    return [line.strip() for line in listed.partition("\n\n")[0].splitlines()]


def test_memory_is_that_of_the_preset_or_as_set(write, capsys) -> None:
    script = write("x = torch.empty(2**28, device='meta')  # 1 GiB")
    assert settings(script, capsys=capsys) == []
    roomy = ["--memory-gib", 1.5]
    assert settings(*roomy, script, capsys=capsys) == ["each GPU has 1.50 GiB of memory"]
    for preset in ("dgx-h100", "laptop"):  # a laptop has no GPU, but it has memory
        options = ["--cluster", preset, "--ranks", 2, "--memory-gib", 0.5]
        assert distlab("sim", *options, script) == 1
        assert "raised OutOfMemory: out of memory in empty" in capsys.readouterr().err


def test_a_trace_without_ending_is_a_folder_with_a_file_per_rank(write, tmp_path: Path) -> None:
    assert distlab("sim", "--ranks", 2, "--trace", tmp_path / "traces", write("")) == 0
    assert len(list((tmp_path / "traces").glob("rank*.json"))) == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--cluster", "dgx-h10"], "unknown preset 'dgx-h10'; valid: laptop, dgx-a100"),
        (["--cluster", "dgx-h10"], "Did you mean 'dgx-h100'?"),
        (
            ["--nodes", "1", "--ranks", "9"],
            "9 ranks need as many GPUs, but dgx-h100 has only 8: use more nodes, or fewer ranks",
        ),
        (["--ranks", "1025"], "has 1 to 1,024 ranks, got 1,025: take fewer nodes or ranks"),
        (["--nodes", "129"], "has 1 to 1,024 ranks, got 1,032: take fewer nodes or ranks"),
        (["--algorithm", "rng"], "'rng' is not one of 'auto', 'ring'"),
        (["--fault", "slow_rank 3"], "--fault: 'slow_rank 3' must be like 'slow_rank 3 2.0'"),
        (["--fault", "slow_rnk 3 2"], "unknown fault 'slow_rnk'; valid: slow_rank, slow_link"),
        (["--fault", "slow_rank 8 2"], "--fault: slow_rank: there is no rank 8; ranks are 0 to 7"),
        (["--fault", "delay 0 8 0.1"], "delay: there is no rank 8; ranks are 0 to 7"),
        (["--fault", "slow_link nvlink* 2"], "no link matches 'nvlink*'"),
        (["--fault", "slow_link node0.* 0.5"], "expected 1 or more, got 0.5"),
        (["--fault", "jitter -1"], "the seconds of 'jitter_s' must be 0 or more, got -1.0"),
        (["--memory-gib", "0"], "--memory-gib 0 must be above 0"),
        (["--memory-gib", "1", "--no-devices"], "--memory-gib needs devices"),
        (["--plot", "x.jpg"], "--plot x.jpg must end in .png or .svg or .pdf"),
        (["--trace", "x.txt"], "--trace x.txt must end in .json or nothing (a folder)"),
        (["--links", "no/where/x.csv"], "there is no folder no/where"),
    ],
)
def test_bad_options_get_one_line_before_anything_runs(
    write, options: list[str], line: str, capsys
) -> None:
    assert distlab("sim", *options, write("print('ran')")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("distlab sim: ")
    assert printed.err.count("\n") == 1
    assert line in printed.err


def test_a_script_that_has_said_why_it_exits_is_not_repeated(write, capsys) -> None:
    says = "import sys\nif dist.get_rank() == 0: print('why', file=sys.stderr)\nsys.exit(3)"
    assert distlab("sim", "--ranks", 2, write(says)) == 1
    assert capsys.readouterr().err == "why\n"
    assert distlab("sim", "--ranks", 2, write("import sys\nsys.exit(3)")) == 1
    assert capsys.readouterr().err == "rank 0 of 2 raised SystemExit: 3, program.py:5 in <module>\n"
    script = write("import sys\nprint('why', file=sys.stderr)\nraise ValueError('this')")
    assert distlab("sim", "--ranks", 2, script) == 1
    assert "rank 0 of 2 raised ValueError: this" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text", "report"),
    [
        (
            [],
            "dist.send(torch.ones(4), 1 - dist.get_rank())",
            "deadlock (send/recv cycle): rank 0 waits",
        ),
        (
            ["--fault", "kill_rank 1 0.001"],
            "import time\ntime.sleep(1)\ndist.barrier()",
            "deadlock",
        ),
        (
            ["--strict"],
            "x = torch.ones(1)\nw = dist.all_reduce(x, async_op=True)\nx += 1\nw.wait()",
            "changed the tensor",
        ),
    ],
)
def test_a_world_that_does_not_end_well_gives_its_report(
    write, options: list[str], text: str, report: str, capsys
) -> None:
    assert distlab("sim", "--ranks", "2", *options, write(text)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert report in printed.err


@pytest.mark.parametrize(
    ("code", "names_them"),
    [
        ('dist.init_process_group("nccl")', True),
        ("model.cuda()", True),
        ('x.to(f"cuda:{rank}")', True),
        ('dist.init_process_group("cpu:gloo,cuda:nccl")', True),
        ('"""Runs on cuda, by nccl."""  # torch.cuda', False),
        ('dist.init_process_group("gloo")', False),
        ("not python", False),
    ],
)
def test_a_script_that_names_gpus_gets_them(tmp_path: Path, code: str, names_them: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    assert names_gpus(script) is names_them


def test_a_race_is_not_followed_by_nothing_found(write, capsys) -> None:
    script = write("""
        x = torch.ones(1 << 20, device=f"cuda:{dist.get_rank()}")
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)
        """)
    assert distlab("sim", "--sanitize", "--semantics", "nccl", "--ranks", 2, script) == 1
    out = capsys.readouterr().out
    assert "--sanitize: nothing else found" in out
