"""Task 4.18's judge counts a rank's operations correctly in a trace of a GPU, not only of a CPU."""

import json
from pathlib import Path

from phase4.judge_profiling import CPU, KERNEL, NCCL, OP, STEP
from phase4.profiles import _content

ON_GPU = "gpu_user_annotation"  # category of an annotation's span on the GPU
# A step of two matrix products and an all-reduce, as torch traces it with NCCL.
EVENTS = [
    (CPU, STEP),
    *[(OP, "aten::matmul"), (OP, "aten::mm"), (KERNEL, "sm90_xmma_gemm_f32f32")] * 2,
    *((OP, "c10d::allreduce_"), (OP, "record_param_comms"), (CPU, "nccl:all_reduce")),
    *((KERNEL, NCCL), (ON_GPU, "nccl:all_reduce"), (ON_GPU, STEP)),
]


def test_what_is_on_the_gpu_too_counts_once(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": cat, "name": name} for cat, name in EVENTS]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert _content(path) == {"steps": 1, "matrix products": 2, "all-reduces": 1}
