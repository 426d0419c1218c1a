"""Run the course on the GPUs of a host: machine costs, trainer, lessons, test suites, links.

    python benchmarks/gpu.py out/gpu              everything, in at most eight minutes on one GPU
    python benchmarks/gpu.py out/gpu costs        only the named parts
    python benchmarks/gpu.py out/gpu --dry        tiny sizes on the CPU, to test the script itself

If the course is not installed, set PYTHONPATH=. to import it from this folder.

Each part runs in its own process, with its own time limit, and saves its results after every step,
so that a failure loses no earlier results. All results end up in ``gpu.json``. Because NCCL allows
only one rank per GPU, several ranks share the GPU in the simulator and over gloo, which cannot send
GPU tensors except in collectives. Where there are several GPUs, ``suites`` uses them for NCCL, and
``several`` measures their links and the trainer's strategies on all of them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cases as cases
import gpu_links as links
import gpu_training as training
import torch

from distlab import launch
from distlab.bench import harness
from distlab.bench.trainer import Sizes
from distlab.production.lessons import find_lessons

ROOT = Path(__file__).resolve().parents[1]
Tell = Callable[[str, object], None]  # saves a result under the given key
PHASES = (1, 2, 3, 4)
LIMIT_OF_A_WORLD_S = 25.0
GPT_SIZES = {"vocab_size": 50304, "context": 1024, "width": 768, "layers": 12, "heads": 12}
TINY_GPT = {"vocab_size": 64, "context": 16, "width": 32, "layers": 2, "heads": 2}
WAYS = {
    "ours, ddp": {"strategy": "ddp"},
    "ours, fsdp": {"strategy": "fsdp"},
    "ours, course": {"strategy": "course", "communication_pattern": "native"},
    "ours, ZeRO 3": {"strategy": "course", "zero_redundancy": 3},
}


# Machine costs


def costs(is_dry: bool, tell: Tell) -> None:
    """Time kernel launches, kernels, reading a number from the GPU, and copies to and from it."""
    tell("versions", {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()})
    device = torch.device("cpu" if is_dry else "cuda")
    if not is_dry:
        about = torch.cuda.get_device_properties(device)
        tell("gpu", [about.name, about.total_memory / 2**30, about.multi_processor_count])
        tell("nccl", torch.cuda.nccl.version())
    one, square = torch.zeros(1, device=device), torch.zeros(64, 64, device=device)
    calls: dict[str, Callable[[], object]] = {
        "add to one number": lambda: one.add_(1),
        "64 x 64 matmul": lambda: square @ square,
        "view": lambda: square.view(-1),
        "empty": lambda: torch.empty(64, device=device),
        "Python alone": lambda: None,
    }
    for name, call in calls.items():
        tell(f"host us, {name}", spent_us(call, 100 if is_dry else 3000))
    tell("us until .item() returns, idle GPU", median(spent_us(one.item, 1) for _ in range(200)))
    if not is_dry:
        tell("gpu us, add to one number, in a graph", graph_us(lambda: one.add_(1)))
        tell("gpu us, 64 x 64 matmul, in a graph", graph_us(lambda: square @ square))
    for num_bytes in (4, 2**20, 2**26)[: 1 if is_dry else 3]:
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        for kind in ("pageable",) if is_dry else ("pageable", "pinned"):
            here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            copies = {"to": partial(there.copy_, here), "from": partial(here.copy_, there)}
            for way, copy in copies.items():
                tell(f"us, {num_bytes} bytes {way} the GPU, {kind}", copy_us(copy))
    side, dtype = 128 if is_dry else 8192, torch.bfloat16
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    whole_us = median(whole_spent_us(lambda: a @ b) for _ in range(10))
    tell("TFLOP/s, bf16 matmul", 2 * side**3 / whole_us / 1e6)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def spent_us(call: Callable[[], object], count: int) -> float:
    """Return a call's mean time on the host; the GPU may still be busy when the call returns."""
    call()
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    synchronize()
    return seconds / count * 1e6


def whole_spent_us(call: Callable[[], object]) -> float:
    """Return the time from the start of a call until the GPU has finished its work."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - start) * 1e6


def copy_us(copy: Callable[..., object]) -> dict[str, float]:
    """Return an asynchronous copy's median times: until the call returns, and until it is done."""
    waits = partial(copy, non_blocking=True)
    returned = [spent_us(waits, 1) for _ in range(20)]
    return {"returns": median(returned), "done": median(whole_spent_us(waits) for _ in range(20))}


def graph_us(call: Callable[[], object], count: int = 1000) -> float:
    """Return a kernel's time without launch overhead, by replaying it in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return median(whole_spent_us(graph.replay) for _ in range(10)) / count


# Training


def images(is_dry: bool, tell: Tell) -> None:
    """Train ResNet-50 at 224 pixels in bfloat16 with the trainer, torch's DDP and bare loops."""
    sizes = Sizes("resnet50", 224, 256, "bf16", "cuda", 8)
    tell("images", by_the_trainer(Sizes("resnet18", 32, 4, steps=1) if is_dry else sizes))


def texts(is_dry: bool, tell: Tell) -> None:
    """Train the smallest GPT-2 in bfloat16, with the same contestants as images."""
    tokens = 500 if is_dry else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        for half in ("train", "val"):
            torch.arange(tokens).remainder(61).to(torch.uint16).numpy().tofile(
                f"{folder}/{half}.bin"
            )
        keys = ["data=tokens", f"data_dir={folder}"]
        gpt_2 = ["layers=12", "width=768", "heads=12", "sequence_length=1024", *keys]
        sizes = Sizes("gpt", 0, 16, "bf16", "cuda", 20, gpt_2)
        tiny = ["layers=1", "width=16", "sequence_length=8", "vocab_size=64", *keys]
        tell("texts", by_the_trainer(Sizes("gpt", 0, 4, steps=1, keys=tiny) if is_dry else sizes))


def by_the_trainer(sizes: Sizes) -> Any:
    """Let the trainer, torch's strategies and bare loops take turns."""
    is_dry = sizes.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            name: sizes.config(Path(folder, str(place)), keys)
            for place, (name, keys) in enumerate(WAYS.items())
        }
        found = {name: find_lessons("solution", config) for name, config in configs.items()}
        rounds = (sizes.steps, 1 if is_dry else 5)
        run = partial(launch.run, training.by_the_trainer, 1, configs, found, *rounds)
        return run(backend="gloo" if is_dry else "nccl", timeout_s=None)[0]


def tokens(is_dry: bool, tell: Tell) -> None:
    """Train the smallest GPT-2 with the lessons' training steps."""
    sizes = (TINY_GPT, 2, 1, 1) if is_dry else (GPT_SIZES, 8, 8, 5)
    run = partial(launch.run, training.train_tokens, 1, *sizes, timeout_s=None)
    tell("tokens", run(backend="gloo" if is_dry else "nccl")[0])


# The lessons


def lessons(is_dry: bool, tell: Tell) -> None:
    """Call the solutions on the GPU, and compare their results with the CPU's."""
    gpu, alone = ("cpu", "gloo") if is_dry else ("cuda:0", "nccl")
    messages = [name for name in cases.CASES if name in cases.MESSAGES]
    collective = [name for name in cases.CASES if name not in messages]
    # 4.18 needs the profiler, which the simulator lacks
    simulated = [name for name in (*messages, *collective) if name != "4.18"]
    worlds = [
        (alone, 1, collective),
        ("gloo", 2, collective),
        ("sim", 2, simulated),
        *(("gloo", 2, [name]) for name in messages),
        ("gloo", 4, collective),
        ("sim", 4, simulated),
    ]
    for backend, ranks, names in worlds[: 4 if is_dry else None]:
        world = f"{backend}, {ranks} ranks"
        expected = in_world("gloo", ranks, names, "cpu")
        for name, found in in_world(backend, ranks, names, gpu).items():
            tell(f"{world}: {name}", beside(found, expected.get(name, {})))


def in_world(backend: str, ranks: int, names: list[str], device: str) -> dict[str, Any]:
    """Run cases in one world or, if that fails, in ever smaller groups; return rank 0's results."""
    kind = {} if backend == "sim" else {"device": device.partition(":")[0]}
    run = partial(launch.run, cases.run_cases, ranks, names, device, backend=backend, **kind)
    try:
        return run(timeout_s=LIMIT_OF_A_WORLD_S)[0]
    except launch.LaunchError as error:
        if len(names) == 1:
            return {names[0]: {"error": f"{type(error).__name__}: {error}"[:400]}}
    half = len(names) // 2
    return {
        name: result
        for part in (names[:half], names[half:])
        for name, result in in_world(backend, ranks, part, device).items()
    }


def beside(found: dict[str, Any], on_cpu: dict[str, Any]) -> dict[str, Any]:
    """Replace a case's values with their largest difference from those on the CPU."""
    if "values" not in found or "values" not in on_cpu:
        missing = {} if "error" in found else {"error on the CPU": on_cpu.get("error")}
        return {**found, **missing, "values": None}
    pairs = zip(found.pop("values"), on_cpu["values"], strict=True)
    apart = [float((mine - other).abs().max()) for mine, other in pairs if len(mine)]
    return {**found, "difference": max(apart, default=0.0)}


# Programs and suites


def programs(is_dry: bool, tell: Tell) -> None:
    """Run the course's commands, as a user with one GPU would."""
    gpu, nccl = ("cpu", "gloo") if is_dry else ("cuda", "nccl")
    out = tempfile.mkdtemp()
    python, config = sys.executable, "configs/imagenet_resnet50.yaml --warmup_epochs 0"
    distlab, two = f"{python} -m distlab", f"--num_gpus 2 --epochs 1 --run_dir {out}"
    train, text = f"{distlab} train --num_gpus 1 --config", "configs/text_cpu.yaml --epochs 1"
    torchrun = f"{python} -m torch.distributed.run --nproc-per-node"
    commands = [
        f"{distlab} doctor",
        f"{train} configs/digits_cnn.yaml --epochs 1 --device {gpu} --run_dir {out}/cnn",
        f"{distlab} train {two}/two",
        f"{distlab} train {two}/gloo --backend gloo --device {gpu}",
        f"{distlab} train {two}/nccl --backend {nccl} --device {gpu}",
        f"{train} {text} --device {gpu} --run_dir {out}/text",
        f"{distlab} sim --ranks 4 scripts/phase3.py ring_all_reduce",
        f"{train} configs/digits_cpu.yaml --device {gpu} --epochs 1 --run_dir {out}/digits",
        f"{torchrun} 1 -m solutions.phase2_advanced.tensor_parallel",
        f"{torchrun} 2 -m solutions.phase2_advanced.tensor_parallel",
        f"{torchrun} 1 scripts/phase1.py broadcast",
        f"{train} {config} --data synthetic --epochs 1 --batch_size 256 --run_dir {out}/224",
        f"{train} {config} --data synthetic --epochs 1 --batch_size 256 --run_dir {out}/compiled"
        " --compile true",
    ]
    for command in commands[: 2 if is_dry else None]:
        shown = command.replace(f"{python} ", "").replace(out, "out")
        start = time.monotonic()
        code, output = finished(command.split(), Path(out, "log"), 100)
        begins = output[:1500] if code else ""  # names the cause; torchrun's report ends the output
        spent_s = time.monotonic() - start
        tell(shown, {"exit": code, "s": spent_s, "begins": begins, "ends": output[-1500:]})


def suites(is_dry: bool, tell: Tell) -> None:
    """Grade the solutions on the default backend and on NCCL, running all suites in parallel."""
    folder, runs = Path(tempfile.mkdtemp()), dict[str, subprocess.Popen[bytes]]()
    chosen = ["-k", "1.4"] if is_dry else []
    for backend in ("auto", "gloo" if is_dry else "nccl"):
        for phase in PHASES[: 1 if is_dry else None]:
            name = f"phase {phase}, {backend}"
            report = f"--report=json={folder / name}.json"
            command = f"-m pytest tests/test_phase{phase}.py --impl solution --backend {backend}"
            with Path(folder, f"{name}.log").open("wb") as log:
                runs[name] = subprocess.Popen(
                    [sys.executable, *command.split(), report, *chosen], stdout=log, stderr=log
                )
    for name, process in runs.items():
        process.wait()
        tell(
            name, graded(folder / f"{name}.json") or Path(folder, f"{name}.log").read_text()[-900:]
        )


def graded(report: Path) -> dict[str, Any]:
    """Return the number of tests, the points, and the tests that did not pass."""
    if not report.exists():
        return {}
    tasks = json.loads(report.read_text())["tasks"]
    tests = [test for task in tasks for test in task["tests"]]
    bad = [test for test in tests if test["outcome"] != "passed"]
    texts = {test["name"]: f"{test['kind']}: {test['message'][:300]}" for test in bad}
    points = f"{sum(t['points'] for t in tasks)} of {sum(t['max_points'] for t in tasks)}"
    return {"tests": len(tests), "failed": len(bad), "points": points, "texts": texts}


# Several GPUs


def several(is_dry: bool, tell: Tell) -> None:
    """Measure links beside the simulator's, and the trainer beside torch's loops, on all GPUs."""
    ranks = 2 if is_dry else torch.cuda.device_count()
    if ranks < 2:
        return
    links_of = ("gloo", links.SIZES[:1]) if is_dry else ("nccl", links.SIZES)
    tell("GB/s, measured and simulated", links.beside_the_simulator(ranks, *links_of))
    bench = f"{sys.executable} -m distlab bench trainer --ranks {ranks}"
    on_gpus = f"{bench} --device cuda --precision bf16 --repeats 5"
    images = f"--model resnet50 --image-size 224 --batch-size {256 * ranks} --steps 8"
    tokens = "layers=12 width=768 heads=12 sequence_length=1024"
    commands = {
        "images": f"{on_gpus} {images}",
        "texts": f"{on_gpus} --model gpt --batch-size {16 * ranks} --steps 8 {tokens}",
    }
    if is_dry:
        commands = {"images": f"{bench} --repeats 1 --steps 1 --only ddp"}
    for name, command in commands.items():
        code, output = finished(command.split(), Path(tempfile.mkdtemp(), "log"), 240)
        tell(f"trainer, {name}", {"exit": code, "ends": output[-3000:]})


# Parts


Part = Callable[[bool, Tell], None]
PARTS: dict[str, tuple[Part, float]] = {  # each with its time limit in seconds
    "costs": (costs, 40),
    "images": (images, 110),
    "texts": (texts, 90),
    "tokens": (tokens, 80),
    "lessons": (lessons, 230),
    "programs": (programs, 230),
    "suites": (suites, 230),
    "several": (several, 600),
}
ALONE = ("costs", "images", "texts", "tokens", "several")
AT_ONCE = (*((name,) for name in ALONE), ("lessons", "programs", "suites"))


def run_part(name: str, path: Path, is_dry: bool) -> None:
    """Run a part, saving all of its results so far whenever a new one arrives."""
    found: dict[str, object] = {}

    def tell(key: str, value: object) -> None:
        found[key] = value
        path.write_text(json.dumps(found, default=str))

    PARTS[name][0](is_dry, tell)


def finished(command: Iterable[str], log: Path, limit_s: float) -> tuple[int | str, str]:
    """Run a command, killing its process group at the time limit; return exit code and output."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command], stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
        code: int | str
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


def main() -> None:
    """Run the parts and save their results; parts that measure time run one at a time."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if not (options.dry or torch.cuda.is_available()):
        raise SystemExit("torch sees no GPU here. `distlab doctor` says what it sees.")
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.inside:
        run_part(options.parts[0], folder / f"{options.parts[0]}.json", options.dry)
        return
    found: dict[str, object] = {}

    def run(name: str) -> None:
        start = time.monotonic()
        flags = ["--inside", *["--dry"] * options.dry]
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), name, *flags]
        # Dry runs need longer, because the parts may share just two CPU cores.
        limit_s = PARTS[name][1] * (5 if options.dry else 1)
        code, log = finished(command, folder / f"{name}.log", limit_s)
        path = folder / f"{name}.json"
        results: Mapping[str, object] = json.loads(path.read_text()) if path.exists() else {}
        spent_s = time.monotonic() - start
        found[name] = {"exit": code, "s": spent_s, "log": log[-2000:] if code else "", **results}
        harness.save(folder, "gpu", found)

    for together in AT_ONCE:
        chosen = [name for name in together if name in (options.parts or PARTS)]
        with ThreadPoolExecutor(len(together)) as pool:
            list(pool.map(run, chosen))


if __name__ == "__main__":
    main()
