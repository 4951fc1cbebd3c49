"""Training under a defense and private training in a group of two processes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import lit_recon._torchvision

import pytest
import torch
from torch import nn

from lit_recon.data.batches import TrainingBatches
from lit_recon.models import Backbone, load_backbone
from lit_recon.modules.data import PoissonSampling
from lit_recon.training.module import BACKBONE_FILE, read_utility
from tests.processes import outputs, ranks

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("training_rank.py")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANK = script()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per kind of training, by two processes, whose copies must end alike."""
    out = tmp_path_factory.mktemp("trained")
    first, second = outputs(ranks(SCRIPT, out))
    assert json.loads(first).keys() == set(RANK.KINDS)
    assert first == second
    return out


def model(folder: Path) -> Backbone:
    return load_backbone(folder / BACKBONE_FILE).model


def assert_close(one: Backbone, two: Backbone) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, two.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_the_identity_trains_as_ddp_does(trained: Path) -> None:
    """Ten images per process and step, BatchNorm's statistics included."""
    assert_close(model(trained / "plain"), model(trained / "identity"))
    plain, identity = (read_utility(trained / kind) for kind in ("plain", "identity"))
    assert identity == pytest.approx(plain, rel=1e-4)


def test_the_mean_of_what_the_processes_release_is_stepped_along(trained: Path) -> None:
    """Each clips its own gradient. Clipped after averaging, one step would be as long as the bound; it is shorter."""
    before, after = RANK.model("group"), model(trained / "defended")
    expected = {name: torch.zeros_like(value) for name, value in before.named_parameters()}
    for rank in range(2):
        [(images, labels)] = TrainingBatches(RANK.images(100).train, 100, 0, False, 0, rank, 2)
        loss = nn.functional.cross_entropy(before.eval()(images), labels)
        gradients = torch.autograd.grad(loss, list(before.parameters()))
        norm = torch.cat([value.flatten() for value in gradients]).norm()
        assert norm > RANK.BOUND
        for name, value in zip(expected, gradients, strict=True):
            expected[name] += value * (RANK.BOUND / norm) / 2
    for name, value in after.named_parameters():
        stepped = (before.state_dict()[name] - value.detach()) / RANK.SCHEDULE.lr
        torch.testing.assert_close(stepped, expected[name], rtol=1e-3, atol=1e-6)


def test_private_processes_sum_what_they_clip(trained: Path) -> None:
    """Four Poisson batches, each shared out, clipped example by example, summed, and divided by the expected size."""
    private, expected = model(trained / "private"), RANK.model("group")
    shares = [PoissonSampling(200, RANK.PLAN.sampling_rate, 0, rank, 2) for rank in range(2)]
    data = RANK.images(50).train
    for step in range(RANK.PLAN.steps_per_epoch):
        total = [torch.zeros_like(value) for value in expected.parameters()]
        for index in torch.cat([share.indices(0, step) for share in shares]).tolist():
            one = torch.tensor([index])
            loss = nn.functional.cross_entropy(expected(data.pixels(one)), data.labels[one])
            gradients = torch.autograd.grad(loss, list(expected.parameters()))
            norm = float(torch.cat([value.flatten() for value in gradients]).norm())
            factor = min(1.0, RANK.PLAN.descent.bound / (norm + 1e-6))
            total = [sum_ + factor * value for sum_, value in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for parameter, sum_ in zip(expected.parameters(), total, strict=True):
                parameter -= RANK.SCHEDULE.lr * sum_ / RANK.PLAN.batch_size
    assert_close(private, expected)
    assert read_utility(trained / "private")["epsilon"] is None
