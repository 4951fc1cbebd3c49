"""The benchmark of kinks, on random images."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kinks import SHARES, Network, pairs_of, roughness, smoothed
from lit_recon.data import ImageSet


def images(n: int, seed: int, shape: tuple[int, ...] = (1, 28, 28)) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, *shape), generator=generator, dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(n) % 2, tuple("0123456789"), "random")


def test_pairs_have_one_label() -> None:
    assert pairs_of(torch.tensor([0, 1, 2, 1, 0, 1]), 3) == [(0, 4), (1, 3), (3, 5)]
    assert pairs_of(torch.tensor([0, 1, 0, 0]), 1) == [(0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "shape", "known"), [("mlp", (1, 28, 28), 40), ("cnn", (3, 32, 32), 10)])
def test_weights_change_by_their_derivative_where_steps_are_small(
    network: Network, shape: tuple[int, ...], known: int
) -> None:
    found = roughness(images(known, 0, shape), images(4, 1, shape), [(0, 2)], "elu", network)
    first = f"{SHARES[0]:g}"
    # a share of 1e-4 leaves a term of second order of about as much
    assert found["cosines"][first]["min"] > 0.999
    assert abs(found["lengths"][first]["median"] - 1) < 0.01
    assert found["cosines"]["1"]["min"] < found["cosines"][first]["min"]


def test_a_sharper_activation_is_nearer_to_relu() -> None:
    fixed, targets = images(40, 0), images(4, 1)
    near, far = (smoothed(fixed, targets, [(0, 2), (1, 3)], sharpness) for sharpness in (1e4, 1.0))
    assert near["cosines"]["median"] > far["cosines"]["median"]
