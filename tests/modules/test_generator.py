"""Training of a generator: its losses, its networks taking turns, and a kill that changes nothing."""

from __future__ import annotations

from pathlib import Path

import lit_recon._torchvision

import pytest
import torch

from lit_recon.data import ImageSet
from lit_recon.data.dataset import fingerprints
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.generator import (
    GeneratorModule,
    GeneratorRecipe,
    autoencoder_loss,
    critic_loss,
    measure_quality,
    search_latents,
    train_generator,
)
from lit_recon.training.trainer import TrainerSettings

CPU = TrainerSettings(accelerator="cpu")
BOTH = GeneratorRecipe(adversarial=0.1, pixel_noise=0.1, lr=5e-3, average=0.9)


@pytest.fixture(scope="module")
def data() -> BackboneDataModule:
    return BackboneDataModule(Digits(), 32, augment=False, n_train=96)


def module(recipe: GeneratorRecipe = BOTH) -> GeneratorModule:
    torch.manual_seed(0)
    return GeneratorModule(ConvGenerator((1, 8, 8), 6, 4), recipe, 4, seed=0)


def trained(data: BackboneDataModule, out: Path, recipe: GeneratorRecipe, epochs: int = 2) -> GeneratorCheckpoint:
    return train_generator(module(recipe), data, epochs, CPU, [], out)


def test_the_autoencoders_loss_is_the_evidence_bound() -> None:
    """Up to the constant of the Gaussian, by PyTorch's own densities."""
    random = torch.Generator().manual_seed(0)
    images, drawn = torch.rand(2, 3, 1, 4, 4, generator=random, dtype=torch.float64)
    mean, log_variance = torch.randn(2, 3, 5, generator=random, dtype=torch.float64)
    normal = torch.distributions.Normal
    likelihood = normal(drawn, 0.2).log_prob(images) - normal(0.0, 0.2).log_prob(torch.zeros_like(images))
    posterior = normal(mean, (log_variance / 2).exp())
    divergence = torch.distributions.kl_divergence(posterior, normal(0.0, 1.0))
    expected = (divergence.sum() - likelihood.sum()) / images.numel()
    torch.testing.assert_close(autoencoder_loss(images, drawn, mean, log_variance, 0.2), expected)


def test_a_critic_that_is_sure_enough_learns_no_more() -> None:
    scores = torch.tensor([1.5, 2.0], requires_grad=True)
    critic_loss(scores, -scores).backward()
    assert scores.grad is not None
    assert float(scores.grad.abs().max()) == 0


@pytest.mark.parametrize(
    ("recipe", "has_critic", "has_encoder"),
    [(BOTH, True, True), (GeneratorRecipe(1.0), True, False), (GeneratorRecipe(0.0, 0.1), False, True)],
    ids=["both", "critic", "encoder"],
)
def test_every_recipe_trains_its_networks(
    recipe: GeneratorRecipe, has_critic: bool, has_encoder: bool, data: BackboneDataModule, tmp_path: Path
) -> None:
    before, training = module(recipe), module(recipe)
    assert (training.critic is not None, training.encoder is not None) == (has_critic, has_encoder)
    checkpoint = train_generator(training, data, 1, CPU, [], tmp_path)
    assert training.global_step == 3 * training.n_optimizers  # 96 images in batches of 32
    old = dict(before.named_parameters())
    still = [name for name, value in training.named_parameters() if torch.equal(value, old[name])]
    # the hinge pushes real and generated images apart, not the scores of both up or down
    assert set(still) <= {f"critic.layers.{len(training.critic.layers) - 1}.bias" if training.critic else ""}
    mean, last = checkpoint.generator.coarse.weight, training.generator.coarse.weight
    assert not torch.equal(mean, last)
    assert checkpoint.epoch == 1
    assert torch.equal(checkpoint.seen, fingerprints(data.train))
    assert checkpoint.split_hash == data.split_hash


def test_training_learns_to_draw_unseen_images(data: BackboneDataModule, tmp_path: Path) -> None:
    recipe = GeneratorRecipe(adversarial=0.0, pixel_noise=0.1, lr=1e-2, average=0.9)
    checkpoint = trained(data, tmp_path, recipe, epochs=20)
    unseen = data.test.pixels(torch.arange(20))
    errors = [
        float((search_latents(generator, unseen, 40, seed=0) - unseen).square().mean().sqrt())
        for generator in (checkpoint.generator, module().generator)
    ]
    assert errors[0] < 0.75 * errors[1]


def test_a_killed_training_ends_with_the_same_generator(
    data: BackboneDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(data, tmp_path / "whole", BOTH)
    step, killed = GeneratorModule._average, RuntimeError("killed")

    def stop(self: GeneratorModule, position: int) -> None:
        if position == 4:  # the second batch of the second epoch
            raise killed
        step(self, position)

    monkeypatch.setattr(GeneratorModule, "_average", stop)
    with pytest.raises(RuntimeError, match="killed"):
        trained(data, tmp_path / "cut", BOTH)
    monkeypatch.undo()
    assert not (tmp_path / "cut" / "generator.safetensors").exists()
    with pytest.raises(ConfigError, match=r"last\.ckpt is of a training on other data"):
        trained(BackboneDataModule(Digits(seed=1), 32, augment=False, n_train=96), tmp_path / "cut", BOTH)
    resumed = trained(data, tmp_path / "cut", BOTH)
    for name, value in whole.generator.state_dict().items():
        assert torch.equal(resumed.generator.state_dict()[name], value), name


def test_what_cannot_be_trained_is_refused(data: BackboneDataModule, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"half")
    with pytest.raises(CorruptFileError, match="start over"):
        trained(data, tmp_path, BOTH)
    with pytest.raises(ConfigError, match="one process"):
        train_generator(module(), data, 1, TrainerSettings("cpu", devices=2), [], tmp_path / "two")
    with pytest.raises(ConfigError, match="diverged at step"):
        trained(data, tmp_path / "huge", GeneratorRecipe(adversarial=0.0, pixel_noise=1e-30))
    for settings, expected in (
        ({"adversarial": 0.0}, "needs a loss"),
        ({"lr": 0.0}, "lr above 0"),
        ({"pixel_noise": -1.0}, "pixel_noise"),
    ):
        with pytest.raises(ConfigError, match=expected):
            GeneratorRecipe(**settings)


def test_quality_compares_with_real_images(data: BackboneDataModule) -> None:
    generator = module().generator
    figures, images = measure_quality(generator, data.train, data.test, 6, 2, seed=0)
    samples, real = images["samples"], images["held_out"]
    assert samples.shape == real.shape == images["found"].shape == (6, 1, 8, 8)
    train = data.train.pixels().flatten(1)
    for name, shown in (("sample", samples), ("held_out", real)):
        distances = torch.cdist(shown.flatten(1), train) / 8  # 64 pixels
        assert figures[f"{name}_nearest_rmse"] == pytest.approx(float(distances.min(1).values.mean()), rel=1e-4)
        spread = torch.pdist(shown.flatten(1)).mean() / 8
        assert figures[f"{name}_spread_rmse"] == pytest.approx(float(spread), rel=1e-4)
    found = (images["found"] - real).square().flatten(1).mean(1).sqrt().mean()
    assert figures["search_rmse"] == pytest.approx(float(found), rel=1e-4)


def test_fingerprints_tell_pixels_and_shapes_apart() -> None:
    pixels = torch.zeros(3, 1, 2, 3, dtype=torch.uint8)
    pixels[1, 0, 0, 0] = 1
    labels = torch.tensor([0, 0, 1])
    numbers = fingerprints(ImageSet(pixels, labels, ["a", "b"], "wide"))
    assert numbers[0] == numbers[2] != numbers[1]
    tall = fingerprints(ImageSet(pixels.reshape(3, 1, 3, 2), labels, ["a", "b"], "tall"))
    assert not torch.isin(tall, numbers).any()
