"""Analytic inversion of vision transformers: one image from the gradients of patches and positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import AnalyticInversion
from lit_recon.attacks.updates.feature_maps.convolutions import find_patch_embedding
from lit_recon.attacks.updates.linear_layer.first_layer import invert
from lit_recon.clients import Client
from lit_recon.defenses import Defense, GaussianNoise, GradientPruning
from lit_recon.errors import ThreatModelError, UnsupportedModelError
from lit_recon.records import Knowledge, Normalization, Observation

SHAPE = (3, 16, 16)
CLASSES, SIDE = 5, 4
TOKENS = (SHAPE[1] // SIDE) ** 2
NORMALIZATION = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


class Transformer(nn.Module):
    """A small vision transformer; `registers` learned tokens stand behind those of the image."""

    def __init__(self, width: int = 24, registers: int = 1, as_maps: bool = False, positions: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, SIDE, stride=SIDE)
        self.registers = nn.Parameter(0.1 * torch.randn(1, registers, width))
        shape = (1, width, SHAPE[1] // SIDE, SHAPE[2] // SIDE) if as_maps else (1, TOKENS + registers, width)
        if positions:
            self.positions = nn.Parameter(0.1 * torch.randn(shape))
        else:
            self.register_buffer("positions", 0.1 * torch.randn(shape))
        self.as_maps = as_maps
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.patches(images)
        tokens = (maps + self.positions if self.as_maps else maps).flatten(2).transpose(1, 2)
        tokens = torch.cat([tokens, self.registers.expand(len(images), -1, -1)], dim=1)
        out: Tensor = self.head(self.block(tokens if self.as_maps else tokens + self.positions).mean(1))
        return out


def torchvision_transformer() -> nn.Module:
    import torchvision

    model = torchvision.models.VisionTransformer(16, SIDE, 1, 2, 24, 48, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def observe(
    model: nn.Module, n: int = 1, defense: Defense | None = None, shape: tuple[int, int, int] = SHAPE
) -> tuple[Observation, Tensor]:
    images = torch.rand(n, *shape, generator=torch.Generator().manual_seed(5))
    client = Client(model, defense=defense, image_shape=shape, normalization=NORMALIZATION)
    return client.observe(images, torch.arange(n), Knowledge()), images


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": torchvision_transformer,
    "registers behind": lambda: Transformer(registers=3),
    "positions of maps": lambda: Transformer(as_maps=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_image_is_exact_and_certified(name: str) -> None:
    torch.manual_seed(0)
    seen, images = observe(MODELS[name]())
    found = AnalyticInversion()(seen)
    # measured: largest errors of 1e-6 to 9e-6
    torch.testing.assert_close(found.images, images, rtol=0.0, atol=5e-4)
    assert found.labels.tolist() == [0]
    assert found.certified is not None
    assert found.certified.tolist() == [True]


def test_an_image_with_borders_outside_all_patches_is_not_certified() -> None:
    torch.manual_seed(0)
    seen, images = observe(Transformer(), shape=(3, 18, 18))
    found = AnalyticInversion()(seen)
    torch.testing.assert_close(found.images[..., :16, :16], images[..., :16, :16], rtol=0.0, atol=5e-4)
    assert found.certified is not None
    assert found.certified.tolist() == [False]
    assert "not certified: no layer sees 204 of its 972 pixels" in found.notes[-1]


def test_the_first_row_of_an_image_is_found_behind_a_class_token() -> None:
    torch.manual_seed(0)
    before, _ = observe(torchvision_transformer())
    behind, _ = observe(Transformer(registers=3))
    places = [find_patch_embedding(seen) for seen in (before, behind)]
    assert [None if place is None else (place.positions, place.first) for place in places] == [
        ("encoder.pos_embedding", 1),
        ("positions", 0),
    ]


@pytest.mark.parametrize(("t", "m", "d"), [(1, 64, 192), (1, 256, 192), (4, 64, 192), (16, 64, 48)])
@pytest.mark.parametrize("noise", [1e-6, 1e-2, 0.1])
def test_the_error_is_hardly_ever_larger_than_the_largest_likely_one(t: int, m: int, d: int, noise: float) -> None:
    """Noise of the derivatives is one factor of a whole image: its error is up to three times the expected one."""
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(100):
        inputs, derivatives = (torch.randn(t, size, generator=generator, dtype=torch.float64) for size in (d, m))
        derivatives *= torch.logspace(0, -0.5, t)[:, None]
        weight = derivatives.T @ inputs
        for value in (weight, derivatives):
            value += noise * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        found = invert(derivatives, weight)
        ratios.append(float((found.inputs - inputs).square().mean().sqrt()) / found.error)
    # measured: at most 0.98, and medians of 0.3 to 0.9
    assert max(ratios) < 1.1
    assert sorted(ratios)[50] > 0.25


@pytest.mark.parametrize("extra", [0, 3])
def test_nothing_is_left_over_to_show_the_error_of_as_many_tokens_as_entries(extra: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, derivatives = (torch.randn(8 + extra, m, generator=generator, dtype=torch.float64) for m in (48, 8))
    assert invert(derivatives, derivatives.T @ inputs).error == torch.inf


@pytest.mark.parametrize(("std", "certified"), [(1e-6, True), (1e-4, False), (1e-3, False)])
def test_only_images_without_much_noise_are_certified(std: float, certified: bool) -> None:
    torch.manual_seed(0)
    seen, images = observe(Transformer(), defense=GaussianNoise(std))
    found = AnalyticInversion()(seen)
    assert found.certified is not None
    assert found.certified.tolist() == [certified]
    # measured: 0.0005, 0.047 and 0.27
    assert ((found.images - images).square().mean().sqrt() < 0.01) == certified
    why = {1e-4: "leave an RMSE of up to", 1e-3: "do not tell the image from noise"}
    assert certified or why[std] in found.notes[-1]


def test_pruned_gradients_are_not_certified() -> None:
    torch.manual_seed(0)
    seen, _ = observe(Transformer(), defense=GradientPruning(0.3))
    found = AnalyticInversion()(seen)
    assert found.certified is not None
    assert not found.certified.any()


def test_more_tokens_than_entries_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match="16 tokens, 12 entries each"):
        AnalyticInversion().check([observe(Transformer(width=12))[0]])


def test_several_images_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ThreatModelError, match="a sum over all 2 images"):
        AnalyticInversion().check([observe(Transformer(), n=2)[0]])


def test_a_transformer_without_learned_positions_is_refused() -> None:
    torch.manual_seed(0)
    seen, _ = observe(Transformer(positions=False))
    assert find_patch_embedding(seen) is None
    with pytest.raises(UnsupportedModelError, match="patch embedding with learned positions"):
        AnalyticInversion().check([seen])


def test_a_first_convolution_of_something_else_is_no_patch_embedding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 24, SIDE, stride=SIDE), nn.Flatten(), nn.Linear(96, CLASSES))
    seen, _ = observe(model)
    assert find_patch_embedding(seen) is None


def test_a_head_of_zeros_hides_all_derivatives() -> None:
    torch.manual_seed(0)
    model = Transformer()
    nn.init.zeros_(model.head.weight)
    assert find_patch_embedding(observe(model)[0]) is None
