"""Bounds of attacked clients: their values, their reasons, their files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_recon.bounds import GaussianPrior, NoisyRelease, autograd_jacobian, cramer_rao
from lit_recon.clients import ClientSettings, GradientOperator, LocalTraining
from lit_recon.defenses import (
    DPSGD,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    MixUp,
    OptimalGradientNoise,
)
from lit_recon.defenses.optimal import sensitivities
from lit_recon.errors import ConfigError
from lit_recon.experiments.settings import BoundSettings
from lit_recon.experiments.update_attack import bound
from lit_recon.experiments.update_attack.bound import bound_facts, bound_notes, update_bound, victim_bounds
from lit_recon.models import MLP, Backbone, ConvNet, Trunk
from lit_recon.records import Batch, Knowledge, Normalization, Weights
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar

D = 16


def backbone(trunk: Trunk | None = None) -> Backbone:
    torch.manual_seed(0)
    return Backbone(trunk or MLP((1, 4, 4), [12], activation="relu"), 3, Normalization((0.5,), (0.25,)))


def batch(n: int = 1) -> Batch:
    return Batch(torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 3)


def found(
    defense: Defense | None,
    n: int = 1,
    trunk: Trunk | None = None,
    knowledge: Knowledge | None = None,
    **settings: Any,
) -> Mapping[str, Scalar]:
    own, known = ClientSettings(**settings), knowledge or Knowledge()
    asked: Any = SimpleNamespace(client=own, defense=defense, bound=BoundSettings(), knowledge=known)
    prior = GaussianPrior.isotropic(D, 0.01)
    client = asked.client.client(backbone(trunk), defense)
    return update_bound(asked, asked.bound, client, batch(n), 0, prior, {})[0]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("std", [1e-4, 1e-3])
def test_the_bound_of_gaussian_noise_is_that_of_the_stored_jacobian(n: int, std: float) -> None:
    model = backbone()
    operator, weights = GradientOperator(model.double()), Weights.of(model)
    dense = autograd_jacobian(
        lambda x: operator(weights, Batch(x, batch(n).labels), "functional"), batch(n).images.double()
    )
    expected = cramer_rao(dense.released(NoisyRelease(std)).information).rmse
    own = found(GaussianNoise(std), n)
    assert own["bound_rmse"] == pytest.approx(expected, rel=1e-3)
    assert own["unknown_directions"] == 0
    error, *values = (
        own[key] for key in ("relative_error", "bound_public_rmse", "bound_independent_rmse", "bound_rmse")
    )
    assert isinstance(error, float)
    assert error < 1e-3
    assert values == sorted(map(float, values))


def test_noise_of_dp_sgd_is_on_the_sum_of_clipped_gradients() -> None:
    # no gradient is clipped: noise of standard deviation 2 on the mean of 3
    assert found(DPSGD(1e3, 0.006), 3)["bound_rmse"] == pytest.approx(
        found(GaussianNoise(2.0), 3)["bound_rmse"], rel=1e-4
    )
    assert found(DPSGD(1e-3, 1.0))["bound_independent_rmse"] == pytest.approx(0.25, rel=0.2)  # measured 0.2499


def test_without_noise_the_rank_decides() -> None:
    everything = found(None)
    assert [everything[key] for key in bound.BOUNDS] == [0.0, 0.0, 0.0]
    few = found(GradientDropout(0.99))
    unknown = few["unknown_directions"]
    assert isinstance(unknown, int)
    assert 0 < unknown < D
    assert few["bound_rmse"] is None
    assert few["bound_independent_rmse"] == pytest.approx(0.25 * math.sqrt(unknown / D), rel=1e-6)
    assert few["bound_public_rmse"] == pytest.approx(0.1 * math.sqrt(unknown / D), rel=1e-6)


def test_a_bound_says_where_rounding_hides_what_an_update_tells() -> None:
    few = found(Chain([GradientDropout(0.97), GaussianNoise(1e-3)]))  # random masks: in single precision
    unknown, unbiased = few["unknown_directions"], few["bound_rmse"]
    assert isinstance(unknown, int)
    assert 0 < unknown < D
    assert isinstance(unbiased, float)  # as much as rounding allows, and not infinite
    assert unbiased > 1  # 3: pixels lie in [0, 1]
    assert isinstance(few["notes"], list)
    [note] = few["notes"]
    assert note.startswith(f"rounding hides what the update tells of {unknown} directions of a client's images, which")
    assert found(GaussianNoise(1e-3))["notes"] == []


@pytest.mark.parametrize(
    "defense", [GradientDropout(1.0), GradientPruning(1.0), ExcludedVariables(".")], ids=lambda one: type(one).__name__
)
def test_where_nothing_is_released_the_prior_remains(defense: Defense) -> None:
    nothing = found(defense)
    assert nothing["unknown_directions"] == D
    assert nothing["bound_rmse"] is None
    assert nothing["bound_public_rmse"] == pytest.approx(0.1, rel=1e-6)


def test_noise_by_coordinate_has_a_bound_that_says_what_it_leaves_out() -> None:
    own = found(OptimalGradientNoise(1e-3))
    assert isinstance(own["bound_rmse"], float)
    assert bound_notes({0: own}) == ["Lower bounds: the information in the variances themselves is left out."]


def test_the_variances_are_those_of_the_client() -> None:
    """Its directions are drawn in single precision: others give an error that is 17 % off."""
    model, defense = backbone(), OptimalGradientNoise(1e-3, directions=2)
    own = found(defense)["bound_rmse"]
    gradient = partial(GradientOperator(model), Weights.of(model))
    sizes = sensitivities(gradient, batch(), defense.directions, ClientSettings().generator(0))
    variances = defense.variances(gradient(batch()), sizes)
    exact = model.double()
    operator, weights = GradientOperator(exact), Weights.of(exact)
    dense = autograd_jacobian(
        lambda x: operator(weights, Batch(x, batch().labels), "functional"), batch().images.double()
    )
    kept = {name: value > 0 for name, value in variances.items()}
    spread = {name: torch.where(kept[name], value, 1.0).double().sqrt() for name, value in variances.items()}
    assert own == pytest.approx(cramer_rao(dense.released(NoisyRelease(spread, kept)).information).rmse, rel=1e-3)


def test_noise_of_other_kinds_and_in_chains_has_a_bound() -> None:
    rmses = {
        name: found(defense)["bound_independent_rmse"]
        for name, defense in {
            "normal": GaussianNoise(1e-3),
            "laplace": LaplaceNoise(1e-3),
            "dropped": Chain([GradientDropout(0.5), GaussianNoise(1e-3)]),
            "clipped": Chain([GradientClipping(1e3), GaussianNoise(1e-3)]),
        }.items()
    }
    # an information of 1 / scale^2 in each coordinate; clipping that does not act
    for name in ("laplace", "clipped"):
        assert rmses[name] == pytest.approx(rmses["normal"], rel=1e-4)  # in single and in double precision
    assert 1.1 * rmses["normal"] < rmses["dropped"] < 2 * rmses["normal"]  # measured 1.5
    relative = found(GaussianNoise(1e-3, relative=True))
    assert bound_notes({0: relative}) == ["Lower bounds: the information in the size of the noise is left out."]


def test_where_no_bound_is_known_the_reason_is_said() -> None:
    for defense in (MixUp(1.0), Chain([GradientDropout(0.5, rescale=True), GaussianNoise(0.1)])):
        with pytest.raises(ConfigError, match="no bound is known"):
            found(defense)
    with pytest.raises(ConfigError, match="one gradient each"):
        found(None, local_steps=LocalTraining(steps=2))
    with pytest.raises(ConfigError, match="one gradient each"):
        found(None, 2, n_clients=2)


def test_no_bound_from_the_update_for_attackers_who_also_have_the_statistics_of_the_batch() -> None:
    given, normed = Knowledge(batch_norm="batch"), ConvNet((1, 4, 4), [2])
    with pytest.raises(ConfigError, match="knows the exact BatchNorm statistics"):
        found(GaussianNoise(0.1), trunk=normed, knowledge=given)
    assert "bound_rmse" in found(GaussianNoise(0.1), trunk=normed)
    assert "bound_rmse" in found(GaussianNoise(0.1), knowledge=given)  # no BatchNorm layer has any


def test_bounds_are_kept_and_their_failures_harm_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = RunFolder(tmp_path), []

    def one(*given: Any) -> tuple[dict[str, Scalar], torch.Tensor]:
        asked.append(given[4])
        if given[4]:
            raise MemoryError if given[4] == 1 else ConfigError("no bound is known\nfor this")
        return {"bound_rmse": 0.5}, torch.eye(D)

    monkeypatch.setattr(bound, "update_bound", one)
    images = SimpleNamespace(pixels=lambda ids=None: torch.rand(3, 1, 4, 4), labels=torch.zeros(3))
    victims: Any = SimpleNamespace(batches=[torch.tensor([i]) for i in range(5)], public=images, test=images)
    for clients in (0, 2, 3):
        settings: Any = SimpleNamespace(client=ClientSettings(), defense=None, bound=BoundSettings(clients=clients))
        known = victim_bounds(settings, backbone(), victims, folder, torch.device("cpu"))
    assert asked == [0, 1, 2]
    reasons = [{"reason": "not computed: MemoryError"}, {"reason": "no bound is known for this"}]
    assert known == dict(enumerate([{"bound_rmse": 0.5}, *reasons]))
    assert list(json.loads(folder.bounds.read_text())) == ["0", "1", "2"]
    facts = bound_facts(known)
    assert facts["bound_rmse"] is None
    assert facts["bound_rmse_reason"] == "not computed: MemoryError; no bound is known for this"


def test_clients_are_summed_up_by_their_mean_squares() -> None:
    values = {"bound_independent_rmse": 0.1, "bound_public_rmse": 0.05}
    two: list[dict[str, Scalar]] = [
        {"bound_rmse": 0.3, "unknown_directions": 0, "relative_error": 0.01, **values},
        {"bound_rmse": 0.4, "unknown_directions": 0, "relative_error": 0.02, **values},
    ]
    facts = bound_facts(dict(enumerate(two)))
    assert facts["bound_rmse"] == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    assert [facts["bound_clients"], facts["bound_relative_error"], facts["bound_unknown_directions"]] == [2, 0.02, 0]
    two[1] |= {"bound_rmse": None, "unknown_directions": 7}
    facts = bound_facts(dict(enumerate(two)))
    assert facts["bound_rmse"] is None
    assert "up to 7 directions" in str(facts["bound_rmse_reason"])
    assert facts["bound_public_rmse"] == pytest.approx(0.05)
    assert bound_facts({}) == {}


@pytest.mark.parametrize("given", [{"clients": -1}, {"chunk": 0}, {"minutes": 0.0}, {"gigabytes": 0.0}])
def test_settings_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"bound.{next(iter(given))}"):
        BoundSettings(**given)
