"""Generators: shapes, latents that stay apart, and files that bring them back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError
from lit_recon.models.generative.generator import (
    ConvCritic,
    ConvGenerator,
    GeneratorCheckpoint,
    draw_samples,
    load_generator,
    save_generator,
)

SHAPES = [(3, 32, 32), (1, 28, 28), (1, 8, 8), (3, 9, 14), (1, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_images_have_the_shape_that_was_asked_for(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    images = ConvGenerator(shape, latent_size=5, width=4)(torch.randn(2, 5)).detach()
    assert images.shape == (2, *shape)
    assert 0 < float(images.min()) < float(images.max()) < 1
    assert ConvCritic(shape, 7, width=4)(images).shape == (2, 7)


def test_an_image_depends_on_its_own_latent_alone() -> None:
    torch.manual_seed(0)
    generator, latents = ConvGenerator((1, 8, 8), 5, 4), torch.randn(3, 5)
    together = generator(latents)
    alone = torch.cat([generator(latent[None]) for latent in latents])
    torch.testing.assert_close(together, alone)
    jacobian = torch.autograd.functional.jacobian(generator, latents).flatten(1, 3)  # (3, 64, 3, 5)
    for i in range(3):
        for j in range(3):
            assert bool(jacobian[i, :, j].abs().max() > 0) == (i == j)


def test_a_critic_under_spectral_norm_changes_slowly() -> None:
    """Every layer has norm about 1, so that a step in the image moves the output by a bounded amount."""
    torch.manual_seed(0)
    images = torch.rand(8, 1, 8, 8)

    def steepness(lipschitz: bool) -> float:
        critic = ConvCritic((1, 8, 8), 1, 4, lipschitz)
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.mul_(10)
            for _ in range(20):  # power iterations
                critic(images)
        leaf = images.clone().requires_grad_()
        [gradient] = torch.autograd.grad(critic(leaf).sum(), leaf)
        return float(gradient.flatten(1).norm(dim=1).max())

    # a kernel's norm as a matrix bounds the convolution within a factor of its 4 to 9 taps' root; inputs are doubled
    assert steepness(lipschitz=True) < 2 * 3 * 2 < steepness(lipschitz=False)


def test_samples_are_functions_of_the_seed() -> None:
    generator = ConvGenerator((1, 8, 8), 5, 4)
    first, second = (draw_samples(generator, 5, 7, torch.Generator().manual_seed(3), chunk) for chunk in (2, 256))
    torch.testing.assert_close(first, second)
    assert not first.requires_grad


@pytest.mark.parametrize("shape", [(8, 8), (1, 0, 8)])
def test_images_without_three_sides_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="image_shape"):
        ConvGenerator(shape)


def test_sizes_and_latents_are_checked() -> None:
    with pytest.raises(ConfigError, match="latent_size and width"):
        ConvGenerator((1, 8, 8), latent_size=0)
    with pytest.raises(ShapeError, match=r"\(n, 5\)"):
        ConvGenerator((1, 8, 8), 5, 4)(torch.randn(2, 6))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    path = tmp_path / "made" / "generator.safetensors"
    seen = torch.tensor([-(2**63), 5, 2**63 - 1])
    save_generator(path, GeneratorCheckpoint(ConvGenerator((1, 8, 8), 5, 4), "digits train", "00ff", seen, 3))
    return path


def test_a_checkpoint_comes_back_bit_for_bit(saved: Path) -> None:
    before = torch.random.get_rng_state()
    found = load_generator(saved)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(1)
    original = ConvGenerator((1, 8, 8), 5, 4)
    for name, value in original.state_dict().items():
        assert torch.equal(found.generator.state_dict()[name], value)
    assert (found.data, found.split_hash, found.epoch) == ("digits train", "00ff", 3)
    assert found.seen.tolist() == [-(2**63), 5, 2**63 - 1]
    assert not found.generator.training
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_files_that_are_no_generator_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"train\.py generator"):
        load_generator(tmp_path / "none.safetensors")
    weights = {"weight": torch.zeros(2)}
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(CorruptFileError, match="as `network`"):
        load_generator(tmp_path / "other.safetensors")
    for header, expected in (
        ({"version": 0}, "another format"),
        ({"version": 1, "arguments": {"image_shape": [1, 8, 8]}}, "its own tensors"),
    ):
        save_file(weights, saved, metadata={"lit_recon.generator": json.dumps(header)})
        with pytest.raises(CorruptFileError, match=expected):
            load_generator(saved)
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="truncated"):
        load_generator(saved)
