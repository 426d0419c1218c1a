"""MFU's peak is that of the exact GPU, and a GPU that no data sheet fits is measured."""

import pytest
import torch

from distlab.production import reports

MEASURED = 7e12


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 7),
        ("NVIDIA Something New", 7),
    ],
)
def test_the_peak_is_that_of_the_exact_gpu(
    name: str, tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    monkeypatch.setattr(reports, "_measured", lambda *_: MEASURED)
    peak = reports.peak_flops_per_s(torch.device("cuda", 0), torch.bfloat16)
    assert peak == pytest.approx(tflops * 1e12)
