"""Products that leave out black pixels against dense ones, and what is trained by them against the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.shadow import GradientDescent, KnownTraining, PrivateDescent, train_models
from lit_recon.attacks.shadow.engines import pixels
from lit_recon.attacks.shadow.engines.batched_mlp import train_batched_mlp
from lit_recon.attacks.shadow.engines.pixels import Parts, UsedPixels, added, block_size, blocks
from lit_recon.attacks.shadow.training import flat_weights
from lit_recon.models.released import ReleasedMLP


def digits(n: int, seed: int = 0) -> Tensor:
    """Images `(n, 1, 5, 6)` in float64 with pixels that nearly all, few and no images have, in turn."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([0.9, 0.04, 0.0]).repeat(10).view(5, 6)
    present = torch.rand(n, 1, 5, 6, generator=generator) < shares
    return present * torch.rand(n, 1, 5, 6, generator=generator, dtype=torch.float64)


def training(n: int, hidden: list[int], descent: GradientDescent) -> tuple[KnownTraining, Tensor, Tensor, Tensor]:
    """Own images have all pixels, also those that are black in the whole fixed set."""
    generator = torch.Generator().manual_seed(3)
    network = ReleasedMLP((1, 5, 6), 4, hidden).double()
    network.initialize(generator)
    known = KnownTraining(network, digits(n), torch.randint(4, (n,), generator=generator), descent)
    own = torch.rand(5, 1, 5, 6, generator=generator, dtype=torch.float64)
    return known, flat_weights(network), own, torch.randint(4, (5,), generator=generator)


def test_pixels_are_told_apart_by_how_many_images_have_them() -> None:
    images = torch.zeros(20, 8)
    images[:, 0], images[:3, 1], images[:2, 2], images[19, 3] = 0.5, 1, 1, 1
    found = UsedPixels.of(images)
    assert found.often is not None
    assert (found.often.tolist(), found.seldom.tolist()) == ([0, 1], [2, 3])
    assert found.n_often(images) == 2


def test_images_without_rare_pixels_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(20, 8) + 0.1
    images[:, 0] = 0  # an eighth of the pixels is what it takes
    assert UsedPixels.of(images).often is not None
    assert UsedPixels.of(images[:, 1:]).often is None
    matrix = torch.rand(3, 7)
    assert UsedPixels.of(images[:, 1:]).split(matrix).often is matrix
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert UsedPixels.of(images).often is None


@pytest.mark.parametrize("size", [7, 100])
def test_products_are_those_of_all_pixels(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "_BLOCK", size)
    images, generator = digits(40).flatten(1), torch.Generator().manual_seed(1)
    kinds = UsedPixels.of(images)
    assert min(len(kinds.seldom), kinds.n_often(images), 30 - len(kinds.seldom) - kinds.n_often(images)) > 5
    made = blocks(images, kinds)
    assert [len(block.often) for block in made] == ([7] * 5 + [5] if size == 7 else [40])
    weights = torch.randn(6, 30, generator=generator, dtype=torch.float64)
    factors = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    outputs = torch.cat([block.outputs(kinds.split(weights)) for block in made], dim=1)
    torch.testing.assert_close(outputs, weights @ images.T, rtol=0, atol=1e-13)
    sums = added([block.sums(factors[:, block.numbers]) for block in made])
    torch.testing.assert_close(kinds.join(sums, 30), factors @ images, rtol=0, atol=1e-13)


def test_images_that_are_all_black_give_nothing() -> None:
    images = torch.zeros(3, 8)
    kinds = UsedPixels.of(images)
    (block,) = blocks(images, kinds)
    assert block.outputs(kinds.split(torch.rand(2, 8))).tolist() == [[0.0] * 3] * 2
    assert kinds.join(block.sums(torch.rand(2, 3)), 8).tolist() == [[0.0] * 8] * 2


def test_blocks_hold_at_least_one_image() -> None:
    assert block_size(torch.zeros(0, 4)) == 1
    assert block_size(torch.zeros(50, 4), n=8) == 8
    assert block_size(torch.zeros(5_000, 1)) == pixels._BLOCK
    assert block_size(torch.zeros(5_000, 1, device="meta")) == 5_000
    (empty,) = blocks(torch.zeros(0, 4), UsedPixels.all_of(torch.zeros(0, 4)))
    assert empty.outputs(Parts(torch.rand(2, 4), None)).shape == (2, 0)


@pytest.mark.parametrize("hidden", [[6], [7, 5]])
@pytest.mark.parametrize(
    "descent",
    [
        GradientDescent(steps=15, snapshots=[4, 9]),
        GradientDescent(steps=15, momentum=0.0),
        GradientDescent(steps=8, lr=0.01, optimizer="adam"),
        GradientDescent(steps=8, dp=PrivateDescent(bound=0.3, noise_multiplier=1.0)),
    ],
    ids=["momentum", "plain", "adam", "noisy"],
)
def test_models_are_those_of_the_loop(
    hidden: list[int], descent: GradientDescent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels, "_BLOCK", 16)
    known, start, own, labels = training(40, hidden, descent)

    def generators() -> list[torch.Generator] | None:
        return [torch.Generator().manual_seed(seed) for seed in range(5)] if descent.is_noisy else None

    by_loop = train_models(known, start, own, labels, "loop", generators())
    for chunk in (2, 5):
        found = train_batched_mlp(known, start, own, labels, generators(), chunk=chunk)
        # Measured at most 2e-14 without Adam, which divides by small numbers.
        torch.testing.assert_close(found, by_loop, rtol=0, atol=1e-10)


def test_float32_is_as_exact_as_in_the_loop() -> None:
    known, start, own, labels = training(40, [6], GradientDescent(steps=60))
    exact = train_models(known, start, own, labels, "loop")
    single = known.on("cpu", torch.float32)
    error = {
        way: float((train_models(single, start.float(), own.float(), labels, way) - exact).norm())
        for way in ("loop", "batched_mlp")
    }
    assert error["batched_mlp"] < 3 * error["loop"]
