"""Linear response against exact training: right to first order in how little one image of many changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.shadow import GradientDescent, KnownTraining, LinearResponse, train_models, train_reference
from lit_recon.attacks.shadow.engine import reference_path
from lit_recon.attacks.shadow.linear_response import bytes_per_model, respond
from lit_recon.attacks.shadow.training import flat_weights
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models.released import ReleasedMLP
from tests.attacks.shadow.conftest import random_images

#: Every direction, and every image.
WHOLE = LinearResponse(rank=1_000, hessian_images=10_000)
OWN = random_images(6, 1)


def training(
    fixed: ImageSet, hidden: Sequence[int] = (6,), activation: str = "elu", repeated: int = 1, **descent: float
) -> tuple[KnownTraining, Tensor]:
    """In float64, with every fixed image so many times."""
    network = ReleasedMLP((1, 5, 5), 4, hidden, activation)  # type: ignore[arg-type]
    network.initialize(torch.Generator().manual_seed(7))
    images, labels = fixed.pixels().repeat(repeated, 1, 1, 1), fixed.labels.repeat(repeated)
    settings = GradientDescent(**{"steps": 30, **descent})  # type: ignore[arg-type]
    known = KnownTraining(network, images, labels, settings).on("cpu", torch.float64)
    return known, flat_weights(known.network)


def linear(known: KnownTraining, start: Tensor, response: LinearResponse = WHOLE, own: ImageSet = OWN) -> Tensor:
    return next(respond(known, start, [(own.pixels().double(), own.labels)], response))


def exact(known: KnownTraining, start: Tensor) -> Tensor:
    trained = train_models(known, start, OWN.pixels().double(), OWN.labels, "loop")
    return trained - train_reference(known, start)


def error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "activation"), [((6,), "elu"), ((6,), "tanh"), ((5, 4), "elu"), ((), "elu"), ((6,), "gelu")]
)
def test_the_error_halves_where_there_are_twice_as_many_images(hidden: Sequence[int], activation: str) -> None:
    fixed, errors = random_images(25, 0), []
    for repeated in (8, 16, 32):
        # The same images again: the path stays, and an own image counts for half as much.
        known, start = training(fixed, hidden, activation, repeated)
        errors.append(error(linear(known, start), exact(known, start)))
    assert errors[-1] < 0.1
    for more, fewer in zip(errors[1:], errors, strict=False):
        assert 0.4 < more / fewer < 0.65, errors


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_first_step_is_exact(momentum: float) -> None:
    known, start = training(random_images(9, 0), steps=1, momentum=momentum)
    torch.testing.assert_close(linear(known, start), exact(known, start), rtol=0, atol=1e-14)


def test_the_second_step_is_nearly_so() -> None:
    known, start = training(random_images(9, 0), steps=2, lr=0.01)
    assert error(linear(known, start), exact(known, start)) < 1e-3  # measured 1e-4


def test_more_directions_are_better() -> None:
    known, start = training(random_images(100, 0))
    truth = exact(known, start)
    errors = [error(linear(known, start, LinearResponse(rank=rank)), truth) for rank in (1, 8, 26)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0] < 0.5


def test_a_hessian_from_some_images_stands_for_all() -> None:
    # Where all images are the same one, so are all samples.
    same = random_images(1, 0)
    known, start = training(same, repeated=20)
    some = linear(known, start, LinearResponse(rank=1_000, hessian_images=3))
    torch.testing.assert_close(some, linear(known, start))
    known, start = training(random_images(200, 0))
    truth = exact(known, start)
    errors = [error(linear(known, start, LinearResponse(1_000, n)), truth) for n in (20, 60, 200)]
    assert errors == sorted(errors, reverse=True)


def test_a_model_does_not_depend_on_the_others() -> None:
    known, start = training(random_images(30, 0))
    known, start = known.on("cpu", torch.float32), start.float()
    groups = [(part.pixels(), part.labels) for part in (OWN, random_images(4, 2))]
    together = list(respond(known, start, groups, LinearResponse(rank=5, hessian_images=8)))
    alone = [next(respond(known, start, [group], LinearResponse(rank=5, hessian_images=8))) for group in groups]
    assert [each.shape for each in together] == [(6, 184), (4, 184)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert together[0].dtype == torch.float32


def test_the_path_is_that_of_the_reference() -> None:
    known, start = training(random_images(9, 0), steps=4)
    path = list(reference_path(known, start, [None] * 4))
    assert len(path) == 5
    assert torch.equal(path[0], start)
    shorter, _ = training(random_images(9, 0), steps=3)
    torch.testing.assert_close(path[3], train_reference(shorter, start), rtol=0, atol=1e-14)


def test_memory_per_model_is_that_of_its_coordinates() -> None:
    known, _ = training(random_images(9, 0))
    assert bytes_per_model(known, 4) == 8 * (2 * 25 + 4 + 2 * (6 * 4 + 6 * 4 + 4))


def test_what_does_not_fit_or_diverges_is_refused() -> None:
    known, start = training(random_images(9, 0))
    with pytest.raises(ShapeError, match="one image of shape"):
        linear(known, start, own=random_images(3, 1, side=4))
    known, start = training(random_images(9, 0), lr=1e300)
    with pytest.raises(ShapeError, match="linear response diverged .* lower descent.lr"):
        linear(known, start)
    for wrong, named in (
        ({"rank": 0}, "at least 1.* got 0, 2000 and 32"),
        ({"hessian_images": 0}, "at least 1"),
        ({"sample": 1}, "linear.sample at least 2"),
        ({"tolerance": 0.0}, "above 0 and at most 1; got 0.0"),
        ({"tolerance": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"rest": 5}, "needs linear.steps; got 5 with linear.steps=0"),
        ({"rest": 9, "steps": 3, "hessian_images": 8}, "from 0 to linear.hessian_images=8"),
    ):
        with pytest.raises(ConfigError, match=named):
            LinearResponse(**wrong)
