"""How one measures on a GPU: a clock that waits for it, its arithmetic, its identity, its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lit_recon._torchvision

import torch

from benchmarks.record import Row


def clock(device: str) -> Callable[[], float]:
    """Wall-clock seconds at which all work given to the device is done."""

    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


@contextmanager
def tensor_float(allowed: bool) -> Iterator[None]:
    """Let a GPU round the factors of float32 products to 10 bits (TF32), or forbid it.

    PyTorch's own default allows it in convolutions. The older of its two ways to say so, because `torch.compile` reads
    the flags by that one and refuses a mixture.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def device_facts(device: str) -> Row:
    """What figures on this device depend on besides the versions of packages."""
    if not device.startswith("cuda"):
        return {"kind": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": torch.cuda.get_device_name(0),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def forget_peak(device: str) -> None:
    """Begin a measurement with the device's memory free."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> Row:
    """The most memory that tensors have taken on the device since `forget_peak`."""
    if not device.startswith("cuda"):
        return {}
    return {"peak_gpu_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1)}
