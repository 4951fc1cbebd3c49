"""A model's file: tensors and a text header, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_model_file(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write tensors and header to `path`, which appears whole or not at all; its folder is made if missing."""
    state = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(state, part, metadata=dict(header))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
