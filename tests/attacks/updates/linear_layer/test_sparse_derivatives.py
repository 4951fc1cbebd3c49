"""Derivatives found by their zeros against those that the tests know."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.attacks.updates import CocktailPartyAttack, KnownLabels
from lit_recon.attacks.updates.linear_layer.first_layer import first_layer, to_inputs
from lit_recon.attacks.updates.linear_layer.sparse_derivatives import completed
from lit_recon.attacks.updates.linear_layer.unmixing import Mixtures
from lit_recon.clients import Client
from lit_recon.models import MLP, Backbone
from lit_recon.records import Knowledge, Normalization, Observation

NORMALIZATION = Normalization((0.45, 0.45, 0.42), (0.25, 0.25, 0.27))
N = 8


def observe(images: Tensor, activation: str = "relu", known: bool = True, hidden: int = 128) -> Observation:
    torch.manual_seed(0)
    model = Backbone(MLP((3, 32, 32), [hidden], activation=activation), 10, NORMALIZATION)
    return Client(model).observe(images, torch.arange(len(images)) % 10, Knowledge(labels=known))


def errors(images: Tensor, found: Tensor) -> Tensor:
    """RMSE of every image to the closest reconstruction."""
    return (images[:, None] - found[None]).square().flatten(2).mean(dim=2).sqrt().amin(dim=1)


def never(mixtures: Mixtures, attempt: int) -> Tensor:
    raise AssertionError("nothing was left to separate")


def rough(images: Tensor, share: float = 0.3) -> Tensor:
    return ((1 - share) * images + share * images.roll(1, 0)).double()


def test_a_rough_guess_leads_to_all_images(photographs: Tensor) -> None:
    images = photographs[:N]
    seen = observe(images)
    guess = rough(images)
    found, proved = completed(guess, torch.arange(N), first_layer(seen), never)
    assert errors(images, guess).min() > 0.01
    assert proved == N
    # measured 1e-6
    assert errors(images, found).max() < 1e-4


def is_in(mixtures: Mixtures, inputs: Tensor) -> Tensor:
    """Whether each input could be a source of the mixtures."""
    coefficients = torch.linalg.lstsq(mixtures.basis.T, (inputs - mixtures.offset).T).solution
    distance = (mixtures.offset + coefficients.T @ mixtures.basis - inputs).norm(dim=1) / inputs.norm(dim=1)
    # measured below 1e-5 and above 0.1
    assert ((distance < 1e-3) | (distance > 0.02)).all()
    return distance < 1e-3


def test_what_is_left_is_separated_without_what_was_found(photographs: Tensor) -> None:
    images = photographs[:N]
    seen = observe(images)
    guess = rough(images, 0.15)
    guess[5:] = 0.5
    left = []

    def separate(mixtures: Mixtures, attempt: int) -> Tensor:
        left.append(is_in(mixtures, to_inputs(images.double(), seen)))
        assert mixtures.n_sources == left[-1].sum()
        return rough(images, 0.15)[left[-1]]

    found, proved = completed(guess, torch.arange(N), first_layer(seen), separate)
    assert left[0].tolist() == [False] * 5 + [True] * 3
    assert proved == N
    assert errors(images, found).max() < 1e-4


def test_with_some_derivatives_unknown_the_guess_is_improved(photographs: Tensor) -> None:
    images = photographs[:N]
    seen = observe(images)
    guess = rough(images, 0.15)
    guess[6:] = 0.5
    found, proved = completed(guess, torch.arange(N), first_layer(seen), lambda mixtures, attempt: guess[6:])
    assert proved == 6
    # measured 0.8
    assert errors(images, found)[:6].mean() < 0.9 * errors(images, guess)[:6].mean()
    torch.testing.assert_close(found[6:], guess[6:])


def test_without_zeros_the_guess_is_left_alone(photographs: Tensor) -> None:
    seen, guess = observe(photographs[:N], "tanh"), rough(photographs[:N])
    found, proved = completed(guess, torch.arange(N), first_layer(seen), never)
    assert proved == 0
    assert torch.equal(found, guess)


def test_a_mixture_of_two_images_is_no_proof(photographs: Tensor) -> None:
    """It has zeros where neither image activates a neuron, many more than a vector can be given."""
    images = photographs[:2]
    result = CocktailPartyAttack(steps=60, labels=KnownLabels())(observe(images))
    assert "derivatives of 2 of 2 images certified" in result.notes[-2]
    assert errors(images, result.images).max() < 1e-4
    assert result.loss < 1e-6
