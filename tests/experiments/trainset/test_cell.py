"""One cell of a study of training sets: what is read from its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from lit_recon.experiments.trainset.cell import _RUN_FORMAT, _Work


def test_a_finished_restart_is_read_to_the_device_of_the_weights(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"loss": 0.5, "curve": {}, "notes": [], "seconds": 1.0}
    tensors = {"images": torch.rand(4, 1, 2, 2), "labels": torch.zeros(4, dtype=torch.int64)}
    _RUN_FORMAT.write(tmp_path / "restart_0.safetensors", tensors, facts)
    like = torch.zeros(1, dtype=torch.float64, device="meta")  # no GPU is needed to ask for another device
    own = _Work(cast(Any, None), tmp_path, tmp_path)
    found = own.restart(cast(Any, SimpleNamespace(like=like)), "restart_0")
    assert (found.images.device, found.images.dtype) == (like.device, torch.float64)
    assert (found.labels.device, found.labels.dtype) == (like.device, torch.int64)  # selections join both
