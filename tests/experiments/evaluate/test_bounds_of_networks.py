"""Bounds of the cells of a grid on real networks, with a stored Jacobian and without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_recon.bounds import (
    GaussianPrior,
    NetworkJacobian,
    NoisyRelease,
    autograd_jacobian,
    fisher_information,
    van_trees,
)
from lit_recon.bounds.fisher import check_size
from lit_recon.clients import ClientSettings, GradientOperator, LocalTraining
from lit_recon.defenses import (
    DPSGD,
    Batch,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    LaplaceNoise,
    MixUp,
    NetworkDropout,
    OptimalGradientNoise,
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    Round,
    SVTPrivacy,
)
from lit_recon.errors import ConfigError
from lit_recon.experiments.evaluate import bounds as command
from lit_recon.experiments.settings import BoundSettings
from lit_recon.experiments.update_attack import bound
from lit_recon.models import MLP, Backbone
from lit_recon.records import Normalization, Update, Weights


def test_a_jacobian_that_is_too_large_is_a_lack_of_memory(too_large: Callable[..., Any], tmp_path: Path) -> None:
    cell = too_large(GaussianNoise(0.1))
    settings = command.AttackSettings(**cell.built(tmp_path))
    with pytest.raises(MemoryError, match="has more than 10 entries .*; or set bound.clients"):
        command._bound(cell, settings, {}, BoundSettings())


@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_noise_that_differs_or_is_not_normal_has_a_bound_too(
    large: bool, too_large: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An information of 1 / scale^2 about each coordinate, as with normal noise of this standard deviation."""
    if not large:
        monkeypatch.setattr(command, "check_size", check_size)
    shared: dict[str, Any] = {}

    def of(defense: Defense, clients: int) -> dict[str, Any]:
        cell = too_large(defense)
        return command._bound(cell, command.AttackSettings(**cell.built(tmp_path)), shared, BoundSettings(clients))

    expected = of(GaussianNoise(0.1), clients=2 * large)
    for defense in (LaplaceNoise(0.1), Chain([GradientClipping(1e3), LaplaceNoise(0.1)])):
        if large:
            with pytest.raises(MemoryError, match="or set bound.clients"):
                of(defense, clients=0)
        found = of(defense, clients=2 * large)
        assert found.get("clients") == (2 if large else None)  # of a small network all
        assert found["rmse"] == pytest.approx(expected["rmse"], rel=1e-4)
    proportional = of(OptimalGradientNoise(0.1), clients=2 * large)
    assert 0 < proportional["rmse"] < 0.25
    assert proportional["notes"] == ["the information in the variances themselves is left out"]
    assert of(GaussianNoise(0.1, relative=True), clients=2 * large)["notes"] == [
        "the information in the size of the noise is left out"
    ]


class _Sign(Defense):
    """One of a user's own, without a closed form."""

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return {name: value.sign() for name, value in update.items()}

    def released_std(self, n_examples: int) -> float:
        return 0.1


@pytest.mark.parametrize(
    "defense", [MixUp(1.0), NetworkDropout(0.5), SVTPrivacy(0.5), _Sign()], ids=lambda defense: type(defense).__name__
)
def test_nobody_is_told_to_wait_for_a_bound_that_is_refused(
    defense: Defense, too_large: Callable[..., Any], tmp_path: Path
) -> None:
    for clients in (0, 2):
        settings = command.AttackSettings(**too_large(defense).built(tmp_path))
        with pytest.raises(ConfigError, match=f"no bound is known for {type(defense).__name__}"):
            command._bound(too_large(defense), settings, {}, BoundSettings(clients))


@pytest.mark.parametrize(
    "client",
    [ClientSettings(n_clients=2), ClientSettings(local_steps=LocalTraining(steps=2))],
    ids=["clients", "steps"],
)
def test_clients_with_more_than_one_gradient_are_refused_at_once(
    client: ClientSettings, too_large: Callable[..., Any], tmp_path: Path
) -> None:
    cell = too_large(GaussianNoise(0.1))
    settings = command.AttackSettings(**{**cell.built(tmp_path), "client": client})
    with pytest.raises(ConfigError, match="clients that release one gradient each"):
        command._bound(cell, settings, {}, BoundSettings())


@pytest.mark.parametrize(
    "defense",
    [
        GaussianNoise(0.1, relative=True),
        GaussianNoise(0.1, before_averaging=True),
        OptimalGradientNoise(0.1),
        DPSGD(1.0, 0.1),
        Chain([PerExampleClipping(0.1), OptimalGradientPruning(0.5), LaplaceNoise(0.1)]),
        PercentilePrivacy(50.0, 0.1),
        ExcludedVariables("fc"),
    ],
    ids=lambda defense: type(defense).__name__,
)
def test_defenses_with_a_closed_form_are_not_refused(defense: Defense) -> None:
    command._require_closed_form(defense)


def test_masks_are_those_of_the_client(
    too_large: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn in single precision; black pixels, whose weights have a gradient of 0 but a Jacobian, may be kept."""
    monkeypatch.setattr(command, "check_size", check_size)
    model = Backbone(MLP((1, 8, 8), (12,), activation="gelu"), 10, Normalization((0.0,), (1.0,))).eval()
    monkeypatch.setattr(command, "sent_out", lambda *_: model)
    dropout, std = GradientDropout(0.5), 0.1
    settings = command.AttackSettings(**too_large(Chain([dropout, GaussianNoise(std)])).built(tmp_path))
    victims = command.victim_data(settings)
    client, weights = GradientOperator(model), command._double(Weights.of(model))
    total = torch.zeros(())
    for number, ids in enumerate(victims.batches):
        images, labels = victims.test.pixels(ids), victims.test.labels[ids]
        assert (images == 0).any()
        update = client(Weights.of(model), Batch(images, labels))
        kept = dropout.kept(
            update, Round(Batch(images, labels), partial(client, weights)), settings.client.generator(number)
        )
        function = partial(_gradient, client, weights, labels)
        released = NoisyRelease(std, kept)
        total = total + fisher_information(autograd_jacobian(function, images.double()), released) / len(
            victims.batches
        )
    expected = van_trees(total, GaussianPrior.fitted(victims.public.pixels(), 1e-4)).rmse
    cell = too_large(settings.defense)
    found = command._bound(cell, settings, {}, BoundSettings())
    assert found["rmse"] == pytest.approx(expected, rel=1e-4)


def _gradient(client: GradientOperator, weights: Weights, labels: torch.Tensor, images: torch.Tensor) -> Update:
    return client(weights, Batch(images, labels), "functional")


@pytest.mark.parametrize("defense", [GaussianNoise, lambda std: DPSGD(1.0, std)], ids=["noise", "dpsgd"])
def test_bounds_without_a_stored_jacobian_are_the_same(
    defense: Callable[[float], Defense], too_large: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [too_large(defense(std)) for std in (0.1, 0.3)]
    built: list[int] = []
    whole = bound.NetworkJacobian

    def counted(*arguments: Any, **named: Any) -> NetworkJacobian:
        built.append(1)
        return whole(*arguments, **named)

    monkeypatch.setattr(bound, "NetworkJacobian", counted)
    found = []
    for large, sizes in ((True, partial(check_size, largest=10)), (False, check_size)):
        monkeypatch.setattr(command, "check_size", sizes)
        shared: dict[str, Any] = {}
        for cell in (*cells, cells[0]):
            settings = command.AttackSettings(**cell.built(tmp_path))
            found.append(command._bound(cell, settings, shared, BoundSettings(clients=2)))
        assert len(built) == 2 * large  # of two clients, for both strengths
        built.clear()
    for without, stored in zip(found[:3], found[3:], strict=True):
        assert without["clients"] == 2
        if without["unbiased_rmse"] is None or stored["unbiased_rmse"] is None:
            assert without["unbiased_rmse"] == stored["unbiased_rmse"]
        else:
            assert without["unbiased_rmse"] == pytest.approx(stored["unbiased_rmse"], rel=1e-3)
        assert without["rmse"] == pytest.approx(stored["rmse"], rel=1e-4)  # at the mean information of two clients
    assert found[0] == found[2]
    assert found[0]["rmse"] < found[1]["rmse"]
