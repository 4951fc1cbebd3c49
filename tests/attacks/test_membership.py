from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lit_recon.attacks.membership import (
    MembershipGames,
    all_losses,
    compare_losses,
    compare_reconstructions,
    compare_trained,
    distances,
    implies_membership,
    own_losses,
)
from lit_recon.attacks.shadow import GradientDescent, KnownTraining, train_models
from lit_recon.attacks.shadow.training import flat_weights, unflatten
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedMLP


def _images(n: int, seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, 1, 3, 3), generator=generator, dtype=torch.uint8)
    return ImageSet(pixels, torch.randint(2, (n,), generator=generator), ["a", "b"], "noise")


def test_a_game_trains_on_the_candidate_that_the_coin_chose() -> None:
    images = _images(40)
    games = MembershipGames.draw(images, seed=3)
    assert 0 < int(games.bits.sum()) < 20
    for index, bit in enumerate(games.bits.tolist()):
        chosen, place = games.chosen, index + 20 * bit
        assert torch.equal(chosen.images[index], images.images[place])
        assert chosen.labels[index] == images.labels[place]
    assert torch.equal(MembershipGames.draw(images, seed=3).bits, games.bits)
    assert not torch.equal(MembershipGames.draw(images, seed=4).bits, games.bits)


def test_candidates_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match="an even number of candidates, two for each game; got 5"):
        MembershipGames.draw(_images(5), seed=0)


def test_training_on_both_candidates_never_errs_where_training_is_deterministic() -> None:
    fixed, games = _images(30, seed=1), MembershipGames.draw(_images(24, seed=2), seed=0)
    network = ReleasedMLP((1, 3, 3), 2, hidden=(4,))
    known = KnownTraining(network, fixed.pixels(), fixed.labels, GradientDescent(steps=20))
    network.initialize(torch.Generator().manual_seed(0))
    start = flat_weights(network)
    # The adversary adds up in another order than the owner: rounding must not matter.
    released = train_models(known, start, games.chosen.pixels(), games.chosen.labels, "loop")
    own = [train_models(known, start, part.pixels(), part.labels, "vmap") for part in (games.first, games.second)]
    assert torch.equal(compare_trained(released, *own) > 0, games.bits == 1)


def test_scores_point_to_the_nearer_candidate() -> None:
    first, second = torch.zeros(2, 3), torch.ones(2, 3)
    released = torch.stack([torch.full((3,), 0.1), torch.full((3,), 0.9)])
    near, far = 0.1 * 3**0.5, 0.9 * 3**0.5
    expected = torch.tensor([near - far, far - near], dtype=torch.float64)
    torch.testing.assert_close(compare_trained(released, first, second), expected, rtol=1e-6, atol=0)
    assert compare_losses(torch.tensor([0.5, 2.0]), torch.tensor([1.0, 1.0])).tolist() == [-0.5, 1.0]


def test_a_reconstruction_within_half_the_distance_cannot_guess_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, 500, 1, 2, 2, generator=generator)
    found = first + 0.6 * torch.rand(500, 1, 1, 1, generator=generator) * torch.randn(500, 1, 2, 2, generator=generator)
    errors, apart = distances(found, first), distances(first, second)
    sure = implies_membership(errors, apart)
    wrong = compare_reconstructions(found, first, second) > 0
    assert 50 < int(sure.sum()) < 450
    assert not (sure & wrong).any()
    assert wrong.any()  # beyond half the distance it can
    torch.testing.assert_close(errors.square(), (found - first).double().square().mean((1, 2, 3)))


def test_losses_are_those_of_each_model_on_its_own_image() -> None:
    network, images = ReleasedMLP((1, 3, 3), 2, hidden=(4,)), _images(300)
    weights = torch.randn(300, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pixels = images.pixels().double()
    found = own_losses(network.double(), weights, pixels, images.labels)
    for index in (0, 255, 256, 299):
        network.load_state_dict(unflatten(network, weights[index]))
        with torch.no_grad():
            expected = F.cross_entropy(network(pixels[index : index + 1]), images.labels[index : index + 1])
        assert float(found[index]) == pytest.approx(expected.item(), rel=1e-12)
    assert not found.requires_grad


def test_every_model_is_tried_on_every_image() -> None:
    network, images = ReleasedMLP((1, 3, 3), 2, hidden=(4,)).double(), _images(6)
    weights = torch.randn(70, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pixels = images.pixels().double()
    found = all_losses(network, weights, pixels, images.labels)
    assert found.shape == (70, 6)
    for index in range(6):
        same = pixels[index].expand(70, -1, -1, -1), images.labels[index].expand(70)
        torch.testing.assert_close(found[:, index], own_losses(network, weights, *same))


def test_losses_are_compared_with_what_they_usually_are() -> None:
    first, second = torch.tensor([0.2, 3.0]), torch.tensor([0.1, 2.0])
    assert (compare_losses(first, second) > 0).tolist() == [True, True]
    # The first image is hard in general, and easy for the first model alone.
    usual = torch.tensor([[3.1, 3.1], [2.9, 2.9]]), torch.tensor([[0.2, 2.4], [0.0, 2.2]])
    expected = torch.tensor([(0.2 - 3.0) - (0.1 - 0.1), (3.0 - 3.0) - (2.0 - 2.3)], dtype=torch.float64)
    torch.testing.assert_close(compare_losses(first, second, *usual), expected, rtol=0, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        compare_trained(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 3))
    network = ReleasedMLP((1, 3, 3), 2)
    with pytest.raises(ShapeError, match="got 1 models, 2 images and 2 labels"):
        own_losses(network, torch.zeros(1, 122), torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.int64))
