"""A backbone that LPIPS can be built from where no ImageNet weights are: the right names and shapes, random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_recon.metrics import perceptual as backbone_weights


@pytest.fixture(scope="session")
def squeezenet() -> dict[str, Tensor]:
    """A whole torchvision state dict, classifier included, as torch.hub would download it."""
    from torchvision.models import squeezenet1_1

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dict(squeezenet1_1(weights=None).state_dict())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of torch.hub; forgets what was downloaded in other tests."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch_home"))
    backbone_weights.download_weights.cache_clear()
    checkpoints = Path(torch.hub.get_dir()) / "checkpoints"
    checkpoints.mkdir(parents=True)
    return checkpoints
