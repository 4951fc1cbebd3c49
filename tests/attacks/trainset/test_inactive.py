"""Whole training sets from the neurons that their images leave inactive: exactly, and nothing where that is not so."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.inactive import InactiveNeurons, LayerChange, _rank, _Search
from lit_recon.attacks.trainset.training import Training
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, LitReconError, ThreatModelError, UnsupportedModelError
from lit_recon.models.centered import CenteredMLP

SHAPE = (1, 8, 8)
LOGISTIC = Training("binary", steps=1000, lr=0.02, objective="log_loss", until=1e-3)


@cache
def digits() -> tuple[Tensor, Tensor]:
    train, _ = Digits().read()
    return train.images[:400].double() / 255, train.labels[:400]


def labels_for(training: Training, n: int) -> Tensor:
    labels = digits()[1][:n]
    return labels if training.task == "multiclass" else labels % 2


def network(n_outputs: int = 1, hidden: tuple[int, ...] = (200,), seed: int = 1, **changed: Any) -> CenteredMLP:
    model = CenteredMLP(SHAPE, n_outputs, hidden, initial_std=None, mean=digits()[0][200:].mean(dim=0), **changed)
    model = model.double()
    model.initialize(torch.Generator().manual_seed(seed))
    return model


def released(model: nn.Module, images: Tensor, training: Training = LOGISTIC) -> ReleasedModel:
    """The model trained on the images, with the labels of the first digits."""
    k = 10 if training.task == "multiclass" else 1
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights = training.run(model, images.to(next(iter(start.values()))), labels_for(training, len(images)), start)
    mean = digits()[0][200:].mean(dim=0)
    return ReleasedModel(
        model,
        weights.weights,
        training.task,
        SHAPE,
        max(k, 2),
        mean,
        len(images),
        weight_decay=training.weight_decay,
        start=start,
    )


@cache
def victim(
    training: Training = LOGISTIC,
    n: int = 10,
    hidden: tuple[int, ...] = (200,),
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
) -> ReleasedModel:
    """A network trained on the first `n` digits."""
    k = 10 if training.task == "multiclass" else 1
    return released(network(k, hidden, seed).to(dtype), digits()[0][:n], training)


def noise(seen: ReleasedModel, m: int) -> Candidates:
    drawn = torch.randn(m, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Candidates(seen, (seen.mean + 0.3 * drawn).to(seen.like), torch.zeros(m, dtype=torch.int64))


def assert_recovered(start: Candidates, labels: Tensor, tolerance: float = 1e-9, steps: int = 100) -> None:
    found, images = InactiveNeurons(steps)(start), digits()[0][: len(labels)]
    errors = (images[:, None] - found.images.double()).abs().flatten(2).amax(dim=2)
    assert errors.amin(dim=1).max() < tolerance
    assert torch.equal(found.labels[errors.argmin(dim=1)], labels)
    assert found.certified is not None
    assert found.certified.all()
    assert found.loss == 0


SGD = Training("binary", steps=300, lr=0.2)


@pytest.mark.parametrize(
    ("training", "n", "hidden", "seed"),
    [
        pytest.param(LOGISTIC, 15, (200,), 1, id="15 images"),
        pytest.param(LOGISTIC, 10, (200, 50), 1, id="two hidden layers"),
        pytest.param(replace(LOGISTIC, task="multiclass", lr=0.05), 10, (200,), 3, id="ten classes"),
        pytest.param(replace(LOGISTIC, task="regression"), 10, (200,), 1, id="squared loss"),
        pytest.param(replace(SGD, momentum=0.9), 10, (200,), 1, id="momentum"),
        pytest.param(replace(SGD, parts=2), 10, (200,), 1, id="mini-batches"),
    ],
)
def test_all_images_are_recovered_from_noise(training: Training, n: int, hidden: tuple[int, ...], seed: int) -> None:
    # measured: 5e-14 at most, within 35 steps
    assert_recovered(noise(victim(training, n, hidden, seed), n), labels_for(training, n))


def test_all_images_are_recovered_from_other_images_in_few_steps() -> None:
    others = Candidates(victim(n=15), digits()[0][300:315], torch.zeros(15, dtype=torch.int64))
    # measured: 3e-14 and 21 steps
    assert_recovered(others, labels_for(LOGISTIC, 15), steps=30)


def test_weights_of_single_precision_give_images_of_single_precision() -> None:
    # measured: 4e-6 of the range of pixels
    assert_recovered(noise(victim(dtype=torch.float32), 10), labels_for(LOGISTIC, 10), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("known", [True, False])
def test_weight_decay_may_be_unknown(known: bool, dtype: torch.dtype) -> None:
    seen = victim(replace(SGD, momentum=0.5, weight_decay=0.01), dtype=dtype)
    seen = seen if known else replace(seen, weight_decay=None)
    # measured: 2e-14, and 4e-6 in single precision
    assert_recovered(noise(seen, 10), labels_for(SGD, 10), tolerance=1e-9 if dtype == torch.float64 else 1e-4)


def test_parts_that_are_trained_on_in_turn_are_all_found() -> None:
    # An image of the first part activates a quarter of the neurons that it left inactive in its turn at the end.
    found = InactiveNeurons(300)(noise(victim(replace(LOGISTIC, lr=0.05, until=0.0, steps=100, parts=2)), 10))
    errors = (digits()[0][:10, None] - found.images).abs().flatten(2).amax(dim=2)
    assert found.certified is not None
    assert found.certified.all()
    assert errors.amin(dim=1).max() < 1e-9  # measured: 1e-14


def test_an_image_that_is_twice_in_the_training_set_counts_once() -> None:
    images = digits()[0][:10].clone()
    images[9] = images[1]
    found = InactiveNeurons(60)(noise(released(network(), images), 12))
    errors = (images[:, None] - found.images).abs().flatten(2).amax(dim=2)
    assert errors.amin(dim=1).max() < 1e-9  # measured: 9e-15
    assert found.certified is not None
    assert found.certified.tolist() == [True] * 9 + [False] * 3
    assert "rank 9, of 10 training images" in found.notes[0]


def test_candidates_beyond_the_training_images_are_returned_as_they_came() -> None:
    start = noise(victim(), 12)
    found = InactiveNeurons(60)(start)
    assert found.certified is not None
    assert found.certified.tolist() == [True] * 10 + [False] * 2
    assert torch.equal(found.images[10:], start.images[10:].clamp(0, 1))


def test_rank_is_before_the_largest_drop() -> None:
    values = torch.tensor([5.0, 1.0, 0.1, 1e-6, 8e-7, 7e-7], dtype=torch.float64)
    assert _rank(values, 5, 1e-15) == 3
    assert _rank(values, 3, 1e-15) == 3
    assert _rank(values[:3], 3, 1e-15) == 3
    assert _rank(values[:3], 5, 1e-15) == 3
    assert _rank(torch.tensor([5.0, 1.0, 0.0, 0.0]), 4, 1e-7) == 2


def test_a_saved_search_goes_on_as_if_never_interrupted() -> None:
    start, attack, buffer = noise(victim(n=15), 15), InactiveNeurons(60), io.BytesIO()
    run, again = attack.begin([start]), attack.begin([start])
    assert run.state is not None
    assert again.state is not None
    for _ in range(20):  # beyond the candidates, so that guesses are drawn
        run.advance()
    assert 0 < run.state.loss < 1
    torch.save(run.state.state_dict(), buffer)
    buffer.seek(0)
    again.state.load_state_dict(torch.load(buffer, weights_only=True))
    [wanted], [found] = run.finish(), again.finish()
    assert run.state.curves == again.state.curves
    assert torch.equal(found.images, wanted.images)
    assert found.certified is not None
    assert found.certified.all()


def test_the_weights_of_another_start_are_no_start() -> None:
    seen = replace(victim(), start=victim(seed=2).start)
    with pytest.raises(UnsupportedModelError, match="there are 0: .* began at other weights"):
        InactiveNeurons().begin([noise(seen, 10)])


def test_nothing_is_certified_of_noisy_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: weight
        + 1e-3 * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        for name, weight in victim().weights.items()
    }
    start = noise(replace(victim(), weights=noisy), 10)
    found = InactiveNeurons(40)(start)
    assert found.certified is not None
    assert not found.certified.any()
    assert torch.equal(found.images, start.images.clamp(0, 1))
    assert found.loss > 0
    assert "hyperplanes were found" in found.notes[1]


def by_hand(rows: Tensor, error: float = 1e-16) -> LayerChange:
    """A change with these rows `(v, r)`, of images in a space of as many dimensions."""
    v, r = rows.shape
    basis, zeros = torch.eye(r, dtype=rows.dtype), torch.zeros(v, r, dtype=rows.dtype)
    return LayerChange(zeros[0, 1:], zeros[0, 1:] + 1, zeros, zeros, rows, torch.arange(v), basis, error, basis)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


#: A normal and 30 rows in its hyperplane.
NORMAL = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
INSIDE = drawn(30, 5) * (1 - NORMAL)


def test_a_hyperplane_is_the_one_that_its_rows_determine() -> None:
    twisted = nn.functional.normalize(NORMAL + 1e-12 * drawn(5), dim=0)
    exact = by_hand(torch.cat([INSIDE, drawn(20, 5)]))._exact(twisted)
    assert exact is not None
    assert (exact @ NORMAL).abs() == pytest.approx(1, abs=1e-14)
    assert exact[:4].abs().max() < 1e-15


def test_rows_in_a_smaller_space_determine_no_hyperplane() -> None:
    flat = INSIDE.clone()
    flat[:, 3] = 1e-14 * drawn(30)
    assert by_hand(flat)._exact(NORMAL) is None


def test_a_direction_of_a_single_row_determines_no_hyperplane() -> None:
    flat = INSIDE.clone()
    flat[1:, 3] = 0
    assert by_hand(flat)._exact(NORMAL) is None
    flat[1:20, 3] = INSIDE[1:20, 3]
    assert by_hand(flat)._exact(NORMAL) is not None


def test_a_hyperplane_needs_more_rows_than_dimensions() -> None:
    assert by_hand(INSIDE[:9])._exact(NORMAL) is None
    assert by_hand(INSIDE[:10])._exact(NORMAL) is not None


def test_rows_lie_in_a_hyperplane_up_to_rounding() -> None:
    long = 1e3 * INSIDE[0] / INSIDE[0].norm()
    rows = torch.stack([INSIDE[0] + 15e-9 * NORMAL, INSIDE[0] + 30e-9 * NORMAL, long + 5e-7 * NORMAL])
    assert by_hand(rows, error=1e-9).within(3 * NORMAL).tolist() == [True, False, True]
    assert by_hand(rows, error=0.0).within(3 * NORMAL).tolist() == [False, False, True]


@cache
def solved() -> tuple[LayerChange, Tensor]:
    """The change of a layer and its true normals `(10, r)`, in the images' order."""
    change = LayerChange.of(victim())
    inputs = change.inputs(digits()[0][:10]) @ change.basis.T
    return change, nn.functional.normalize(torch.linalg.inv(inputs).T, dim=1)


def search(change: LayerChange, normals: Tensor) -> _Search:
    own = _Search(noise(victim(), 10), change)
    own.normals = normals
    return own


def test_true_normals_give_the_images() -> None:
    change, normals = solved()
    images, sure = search(change, normals).solution()
    assert sure.all()
    assert (images - digits()[0][:10].flatten(1)).abs().max() < 1e-9  # measured: 6e-14


def test_an_image_between_two_is_not_certified() -> None:
    change = solved()[0]
    inputs = change.inputs(digits()[0][:10]) @ change.basis.T
    inputs[4] = (inputs[4] + inputs[5]) / 2
    images, sure = search(change, nn.functional.normalize(torch.linalg.inv(inputs).T, dim=1)).solution()
    assert float(images.min()) > -1e-9  # all are in the pixels' range
    assert not sure[4]
    assert sure[[0, 1, 2, 3, 6, 7, 8, 9]].all()


def test_an_image_out_of_the_range_of_pixels_is_not_certified() -> None:
    images = digits()[0][:10].clone()
    images[3] = 1.5 * images[3]
    own = _Search(noise(released(network(), images), 10), LayerChange.of(released(network(), images)))
    inputs = own.change.inputs(images) @ own.change.basis.T
    own.normals = torch.linalg.inv(inputs).T
    found, sure = own.solution()
    assert (found - images.flatten(1)).abs().max() < 1e-9
    assert sure.tolist() == [True] * 3 + [False] + [True] * 6


def test_a_false_normal_is_forgotten_once_all_are_there() -> None:
    change, normals = solved()
    false = nn.functional.normalize(normals[0] + 0.3 * normals[1], dim=0)
    own = search(change, torch.cat([normals[:3], false[None], normals[3:8]]))
    own.add(normals[8])
    assert torch.equal(own.normals, normals[:9])
    own.add(-normals[8])  # known
    assert torch.equal(own.normals, normals[:9])
    own.add(normals[9])
    assert own.solution()[1].all()


def test_guesses_are_combinations_of_the_images_still_to_be_found() -> None:
    change, normals = solved()
    own = search(change, normals[:7])
    inputs = change.inputs(digits()[0][:10])
    for step in range(20):  # ten candidates and ten random images
        guess = own.guess(step)
        shares = torch.linalg.lstsq(inputs.T, guess.T).solution.flatten()
        assert shares[:7].abs().max() < 1e-9 * shares[7:].abs().max()
        assert float(guess[0, -1]) > 0


def test_guesses_with_one_image_to_be_found_are_this_image() -> None:
    change, normals = solved()
    for missing, image in enumerate(digits()[0][:10]):
        own = search(change, normals[torch.arange(10) != missing])
        for step in range(10):
            guess = own.guess(step)
            # Some of these projections point the other way, which would exchange active and inactive neurons.
            assert float(guess[0, -1]) > 0
            assert (change.images(guess) - image.flatten()).abs().max() < 1e-10  # measured: 3e-14


def test_inactive_neurons_are_so_at_the_start_and_at_the_end() -> None:
    change, seen, images = solved()[0], victim(), digits()[0][:10]
    assert seen.start is not None
    first, last = (
        nn.functional.linear((images - seen.mean).flatten(1), weights["layers.1.weight"], weights["layers.1.bias"]) <= 0
        for weights in (seen.start, seen.weights)
    )
    found = change.inactive(change.inputs(images))
    assert torch.equal(found, (first & last)[:, change.neurons])
    assert found.sum() < first[:, change.neurons].sum()
    assert found.sum() < last[:, change.neurons].sum()


def test_equal_guesses_choose_different_rows_that_they_leave_inactive() -> None:
    change, normals = solved()
    own = search(change, normals[:9])
    inactive = change.inactive(own.guess(0))[0]
    one, other = own.chosen(0), own.chosen(0)
    assert not torch.equal(one, other)
    for chosen in (one, other):
        assert not (chosen & ~inactive).any()
        assert 0.75 < float(chosen.sum() / inactive.sum()) < 1  # measured: 0.9 is drawn


def _without_biases() -> ReleasedModel:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40, bias=False), nn.ReLU(), nn.Linear(40, 1)).double()
    return released(model, digits()[0][:5], replace(LOGISTIC, steps=2))


@pytest.mark.parametrize(
    ("seen", "error", "message"),
    [
        (lambda: replace(victim(), start=None), ThreatModelError, "give the start"),
        (
            lambda: released(network(activation="tanh"), digits()[0][:5], replace(LOGISTIC, steps=2)),
            UnsupportedModelError,
            "no ReLU",
        ),
        (_without_biases, UnsupportedModelError, "no biases"),
        (lambda: victim(hidden=(20,)), UnsupportedModelError, "10 images need .* there are 20"),
    ],
)
def test_assumptions_that_do_not_hold(seen: Any, error: type[LitReconError], message: str) -> None:
    with pytest.raises(error, match=message):
        InactiveNeurons().begin([noise(seen(), 10)])


def test_at_least_one_step() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        InactiveNeurons(steps=0)
