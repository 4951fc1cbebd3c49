"""The paper's reconstructor for color images: its losses, its two networks taking turns, and a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_recon.attacks.released.base import Background, ShadowSizes
from lit_recon.attacks.released.networks import convolutional as reconstructor_adversarial
from lit_recon.attacks.released.networks.convolutional import (
    AdversarialReconstructorModule,
    ConvolutionalReconstructor,
    PerceptualLoss,
    discriminator_loss,
)
from lit_recon.errors import ConfigError, MissingDataError
from lit_recon.metrics import Lpips
from lit_recon.models.reconstructors import PatchDiscriminator, ReconstructorCNN

NO_LPIPS = PerceptualLoss(network="none")
SMALL: dict[str, Any] = {"perceptual": NO_LPIPS, "epochs": 2, "batch_size": 8, "accelerator": "cpu"}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's networks with a twentieth of their channels."""
    monkeypatch.setattr("lit_recon.models.reconstructors._CHANNELS", (4, 3))
    monkeypatch.setattr("lit_recon.models.reconstructors._PATCH_LAYERS", ((4, 2), (4, 2), (4, 2), (4, 1)))


@pytest.fixture(scope="module")
def squeezenet() -> dict[str, Tensor]:
    """The right names and shapes of a backbone of LPIPS, random numbers."""
    from torchvision.models import squeezenet1_1

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dict(squeezenet1_1(weights=None).state_dict())


def shadows(s: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.rand(s, 3, generator=generator)
    images = codes[:, :, None, None].expand(-1, -1, 24, 24).contiguous()
    return codes @ torch.randn(3, 10, generator=generator), images, torch.arange(s) % 4


def test_the_losses_are_the_papers(squeezenet: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    features, images = torch.randn(3, 10, generator=generator), torch.rand(3, 3, 32, 32, generator=generator)
    torch.manual_seed(0)
    network, discriminator = ReconstructorCNN(10, (3, 32, 32)), PatchDiscriminator(3)
    lpips = Lpips("squeeze", squeezenet)
    module = AdversarialReconstructorModule(network, discriminator, (lpips, 0.5), adversarial=0.25)
    losses: list[Tensor] = []
    module._descend = lambda optimizer, loss: losses.append(loss)  # type: ignore[method-assign]
    module.optimizers = lambda: [None, None]  # type: ignore[method-assign, assignment]
    module.training_step((features, images), 0)
    found = network(features)
    real, false = discriminator(images), discriminator(found)
    expected = ((real - 1) ** 2).mean() / 2 + (false**2).mean() / 2
    torch.testing.assert_close(losses[0], expected)
    pixels = (found - images).abs().mean() + ((found - images) ** 2).mean()
    opinion = 0.25 * ((false - 1) ** 2).mean()
    torch.testing.assert_close(losses[1], pixels + opinion + 0.5 * lpips(found.detach(), images).mean().float())
    # The reconstructor's loss moves no weight of the discriminator, and reaches the reconstructor through LPIPS, too.
    losses[1].backward()
    assert all(value.grad is None for value in discriminator.parameters())
    assert all(value.grad is not None for value in network.parameters())
    assert not torch.equal(lpips.loss(network(features), images), torch.zeros(3))


def test_a_discriminator_that_is_right_has_no_loss() -> None:
    assert float(discriminator_loss(torch.ones(2, 1, 2, 2), torch.zeros(2, 1, 2, 2))) == 0


def test_its_optimizers_are_those_of_the_paper() -> None:
    paper = ConvolutionalReconstructor()
    assert (paper.lr, paper.weight_decay, paper.discriminator_lr) == (1e-4, 1e-4, 1e-5)
    assert (paper.batch_size, paper.epochs) == (128, 1000)
    module = AdversarialReconstructorModule(ReconstructorCNN(4, (3, 24, 24)), PatchDiscriminator(3), None)
    own, other = module.configure_optimizers()
    assert (own.defaults["lr"], own.defaults["weight_decay"]) == (1e-4, 1e-4)
    assert (other.defaults["lr"], other.defaults["weight_decay"]) == (1e-5, 0)


def test_it_learns_and_says_what_it_did_without() -> None:
    differences, images, labels = shadows()
    attack = ConvolutionalReconstructor(**{**SMALL, "lr": 5e-3, "epochs": 60})
    before = torch.get_rng_state()
    fitted = attack.fitted(differences, images, labels, 4)
    assert torch.equal(torch.get_rng_state(), before)
    found = fitted.reconstruct(differences)
    assert (found.images - images).square().mean() < 0.5 * (images.mean(dim=0) - images).square().mean()
    assert torch.equal(found.labels, labels)
    assert fitted.notes == ("The reconstructor was trained without LPIPS: switched off by perceptual.network.",)
    assert fitted.facts["training_loss"] > 0


def test_a_killed_training_ends_as_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    differences, images, labels = shadows()
    attack = ConvolutionalReconstructor(**SMALL)
    whole = attack.fitted(differences, images, labels, 4).reconstruct(differences).images
    informed = attack.bind(Background(state=tmp_path))
    step, steps = AdversarialReconstructorModule.training_step, []

    def stop(self: AdversarialReconstructorModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        steps.append(batch_idx)
        if len(steps) == 4:  # the second batch of the second epoch
            raise RuntimeError("killed")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(AdversarialReconstructorModule, "training_step", stop)
        with pytest.raises(RuntimeError, match="killed"):
            informed.fitted(differences, images, labels, 4)
    resumed = informed.fitted(differences, images, labels, 4).reconstruct(differences).images
    assert torch.equal(resumed, whole)


def test_lpips_takes_part_where_its_weights_are(tmp_path: Path, squeezenet: dict[str, Tensor]) -> None:
    path = tmp_path / "squeeze.safetensors"
    save_file(squeezenet, path)
    perceptual = PerceptualLoss(network="squeeze", weights=path)
    differences, images, labels = shadows(8)
    without = ConvolutionalReconstructor(**SMALL).fitted(differences, images, labels, 4)
    fitted = ConvolutionalReconstructor(**{**SMALL, "perceptual": perceptual}).fitted(differences, images, labels, 4)
    assert fitted.notes == ()
    changed = fitted.reconstruct(differences).images != without.reconstruct(differences).images
    assert changed.any()
    with pytest.raises(MissingDataError, match="there is no file"):
        PerceptualLoss(network="squeeze", weights=tmp_path / "none").loaded()


def test_without_a_discriminator_there_is_one_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(reconstructor_adversarial, "PatchDiscriminator", made.append)
    ConvolutionalReconstructor(**{**SMALL, "adversarial": 0.0, "epochs": 1}).fitted(*shadows(8), 4)
    assert made == []
    module = AdversarialReconstructorModule(ReconstructorCNN(4, (3, 24, 24)), None, None)
    assert module.n_optimizers == len(module.configure_optimizers()) == 1


def test_small_images_are_refused_before_shadow_models_are_trained() -> None:
    sizes = ShadowSizes(10, 4, (1, 8, 8), 10)
    with pytest.raises(ConfigError, match="at least 24 x 24 pixels; got 8 x 8"):
        ConvolutionalReconstructor(**SMALL).bind(Background(sizes=sizes))
    large = Background(sizes=sizes._replace(image_shape=(1, 24, 24)))
    ConvolutionalReconstructor(**SMALL).bind(large)
    odd = Background(sizes=sizes._replace(image_shape=(1, 28, 30)))
    for adversarial in (0.0, 1.0):
        with pytest.raises(ConfigError, match="multiples of 4 pixels; got 28 x 30"):
            ConvolutionalReconstructor(**{**SMALL, "adversarial": adversarial}).bind(odd)
    ConvolutionalReconstructor(**{**SMALL, "adversarial": 0.0}).bind(Background(sizes=sizes))


def test_what_cannot_be_trained_is_refused() -> None:
    differences, images, labels = shadows()
    with pytest.raises(ConfigError, match="at least 24 x 24 pixels; got 8 x 8"):
        ConvolutionalReconstructor(**SMALL).fitted(differences, images[:, :, :8, :8], labels, 4)
    for wrong in ({"epochs": 0}, {"lr": 0.0}, {"adversarial": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ConfigError, match="must be at least"):
            ConvolutionalReconstructor(**wrong)
    with pytest.raises(ConfigError, match="weight must be above 0"):
        PerceptualLoss(weight=0.0)
