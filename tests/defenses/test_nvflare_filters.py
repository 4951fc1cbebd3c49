"""NVFlare's filters as defenses, against loops over single entries that follow their description."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lit_recon.defenses import (
    Chain,
    Defense,
    ExcludedVariables,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    PercentilePrivacy,
    Round,
    SVTPrivacy,
)
from lit_recon.defenses import noise as with_noise
from lit_recon.defenses.combined import AveragedDefense
from lit_recon.defenses.noise import _first_passes, _log_waiting
from lit_recon.defenses.vectors import flatten, mean_update
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Noise, Update


def entries(*values: float) -> Update:
    """Two tensors and one without dimensions."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return {"a": numbers[:2].view(2, 1), "b": numbers[2:-1], "scalar": numbers[-1]}


MIXED = entries(0.5, -0.1, 0.3, -0.3, 0.0, 2.0, -1.5, 0.3, 0.9)


def percentile_privacy(update: Update, percentile: float, gamma: float, lr: float) -> dict[str, Any]:
    """One entry after the other, as weight differences per step."""
    differences = {name: (lr * value.numpy()) for name, value in update.items()}
    cutoff = np.percentile([abs(entry) for value in differences.values() for entry in value.reshape(-1)], percentile)
    released = {}
    for name, value in differences.items():
        new = [0.0 if abs(entry) < cutoff else max(-gamma, min(gamma, entry)) for entry in value.reshape(-1)]
        released[name] = np.array(new if value.ndim else [float(value)]).reshape(value.shape) / lr
    return released


@pytest.mark.parametrize("lr", [1.0, 0.25])
@pytest.mark.parametrize("gamma", [math.inf, 0.125, 10.0])
@pytest.mark.parametrize("percentile", [0.0, 5.0, 25.0, 50.0, 62.5, 90.0, 100.0])
def test_percentile_privacy(
    round_: Round, generator: torch.Generator, percentile: float, gamma: float, lr: float
) -> None:
    released = PercentilePrivacy(percentile, gamma, lr).transform_update(MIXED, round_, generator)
    expected = percentile_privacy(MIXED, percentile, gamma, lr)
    for name, value in released.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-15, atol=0)


@pytest.mark.parametrize("percentile", [0.0, 37.0, 90.0])
def test_percentile_privacy_of_a_network(
    update: Update, round_: Round, generator: torch.Generator, percentile: float
) -> None:
    gamma = float(flatten(update).abs().quantile(0.95))
    released = PercentilePrivacy(percentile, gamma).transform_update(update, round_, generator)
    expected = percentile_privacy(update, percentile, gamma, 1.0)
    assert all(np.array_equal(value.numpy(), expected[name]) for name, value in released.items())
    p = len(flatten(update))
    assert int((flatten(released) == 0).sum()) == math.ceil(percentile / 100 * (p - 1))


def test_the_attacker_bounds_clipped_entries(round_: Round, generator: torch.Generator) -> None:
    defense = PercentilePrivacy(50.0, gamma=0.1, lr=0.1)
    released = defense.transform_update(MIXED, round_, generator)
    candidate = {name: torch.full_like(value, 3.0) for name, value in MIXED.items()}
    simulated = defense.simulate(candidate, released)
    assert simulated["a"].flatten().tolist() == [1.0, 0.0]
    assert simulated["b"].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert float(simulated["scalar"]) == 3.0
    large = released | {"scalar": torch.tensor(-4.0)}  # is not clipped
    for chained in (defense, Chain([Defense(), defense])):
        masks = chained.censored(large)
        assert [masks[name].flatten().tolist() for name in masks] == [
            [False, False],
            [False, False, False, True, True, False],
            [False],
        ]
    assert not any(mask.any() for mask in LaplaceNoise(0.1).censored(released).values())
    assert not any(mask.any() for mask in PercentilePrivacy(50.0).censored(released).values())


def test_censored_entries_in_single_precision(round_: Round, generator: torch.Generator) -> None:
    update = {"a": torch.randn(1000, generator=generator)}
    defense = PercentilePrivacy(gamma=0.01, lr=0.03)
    released = defense.transform_update(update, round_, generator)
    assert torch.equal(defense.censored(released)["a"], update["a"].abs() >= 0.01 / 0.03)


@pytest.mark.parametrize("clients", [3, 7])
def test_entries_that_all_clients_cut_off_are_seen_in_their_mean(round_: Round, clients: int) -> None:
    defense = PercentilePrivacy(gamma=0.01)
    update = {"a": torch.tensor([[5.0, -3.0, 0.002]])}
    mean = mean_update([defense.transform_update(update, round_, torch.Generator())] * clients)
    if clients == 7:
        assert float(mean["a"].max()) < 0.01  # rounded
    assert AveragedDefense(defense, clients).censored(mean)["a"].tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    "later", [[GradientClipping(0.01)], [GradientDropout(0.5)], [Chain([GradientClipping(0.01)]), GradientPruning(0.3)]]
)
@pytest.mark.parametrize("clients", [1, 7])
def test_entries_cut_off_before_a_scaling_tie_at_the_largest_magnitude(
    round_: Round, generator: torch.Generator, later: list[Defense], clients: int
) -> None:
    values = 0.02 * torch.randn(40, 40, generator=generator)
    update = {"a": values, "b": values[:1] / 4, "scalar": torch.tensor(3.0)}  # of which the last passes the filter
    defense = Chain([PercentilePrivacy(gamma=0.01), *later])
    release = defense.transform_update(update, round_, generator)
    found = AveragedDefense(defense, clients).censored(mean_update([release] * clients))
    for name in ("a", "b"):
        assert torch.equal(found[name], (update[name].abs() >= 0.01) & (release[name] != 0))
    assert found["a"].any()
    assert not found["scalar"]


def test_without_a_tie_the_limit_of_the_filter_counts(round_: Round, generator: torch.Generator) -> None:
    defense = Chain([PercentilePrivacy(gamma=0.01), GradientClipping(10.0)])
    release = defense.transform_update({"a": torch.tensor([0.02, 0.003, 0.001])}, round_, generator)
    assert defense.censored(release)["a"].tolist() == [True, False, False]
    assert not defense.censored({"a": torch.zeros(3)})["a"].any()


def svt_shared(
    values: list[float], fraction: float, epsilon: float, gamma: float, tau: float, replace: bool, rng: Any
) -> np.ndarray:
    """Which entries the sparse vector technique releases: pass after pass, entry after entry."""
    count = math.ceil(fraction * len(values))
    ratio = (2 * count) ** (2 / 3)
    of_threshold = epsilon / (1 + ratio)
    of_query = epsilon - of_threshold
    threshold = tau + rng.laplace(scale=gamma / of_threshold)
    accepted: list[int] = []
    while len(accepted) < count:
        for i in [i for i in range(len(values)) if i not in accepted]:
            response = abs(max(-gamma, min(gamma, values[i]))) + rng.laplace(scale=2 * count * gamma / of_query)
            if response >= threshold:
                accepted.append(i)
    shared = np.zeros(len(values), dtype=bool)
    shared[rng.choice(accepted, size=count, replace=replace)] = True
    return shared


@pytest.mark.slow
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize(
    ("fraction", "epsilon", "tau", "lr"), [(0.4, 30.0, 0.7, 1.0), (0.25, 100.0, 1.05, 0.5), (0.6, 10.0, -0.2, 2.0)]
)
def test_svt_shares_as_often_as_a_loop(
    round_: Round, generator: torch.Generator, fraction: float, epsilon: float, tau: float, lr: float, replace: bool
) -> None:
    values, draws, rng = [0.9, -0.1, 0.4, -0.7, 0.2, 3.0, -1.5, 0.05], 2000, np.random.default_rng(0)
    update = {"a": torch.tensor(values[:3], dtype=torch.float64) / lr, "b": torch.tensor([values[3:]]).double() / lr}
    defense = SVTPrivacy(fraction, epsilon, 1.0, 1.0, tau, replace, lr)
    ours = sum((flatten(defense.transform_update(update, round_, generator)) != 0).numpy() for _ in range(draws))
    loop = sum(svt_shared(values, fraction, epsilon, 1.0, tau, replace, rng) for _ in range(draws))
    # both are binomial: 4.5 standard deviations of the difference, 8 times in 6 cases
    rate = (ours + loop) / (2 * draws)
    assert (np.abs(ours - loop) <= 4.5 * np.sqrt(2 * draws * rate * (1 - rate)) + 1e-9).all(), (ours, loop)
    assert ours.max() > 1.1 * ours.min()


def test_the_budget_is_divided_as_stated(
    round_: Round, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(with_noise, "_log_waiting", lambda excess, scale, _: seen.append((excess, scale)) or excess)
    update = {"a": torch.zeros(1000)}
    for _ in range(2000):
        SVTPrivacy(0.1, 0.5, gamma=2.0, tau=7.0).transform_update(update, round_, generator)
    of_query = 0.5 * 200 ** (2 / 3) / (1 + 200 ** (2 / 3))
    assert seen[0][1] == pytest.approx(2 * 100 * 2.0 / of_query, rel=1e-12)
    thresholds = torch.stack([-excess[0] for excess, _ in seen]) - 7.0
    assert float(thresholds.abs().mean()) == pytest.approx(2.0 / (0.5 - of_query), rel=0.1)


def test_times_until_acceptance_are_geometric(generator: torch.Generator) -> None:
    n, excess = 40_000, torch.tensor([-1.5, -0.4, 0.0, 0.4, 1.5], dtype=torch.float64)
    times = _log_waiting(excess.repeat(n, 1), 0.5, generator).exp().ceil().clamp_min(1)
    at_once = torch.where(excess < 0, 0.5 * (excess / 0.5).exp(), 1 - 0.5 * (-excess / 0.5).exp())
    spread = ((1 - at_once) / n).sqrt()
    assert ((times == 1).double().mean(0) - at_once).abs().le(4 * (at_once * (1 - at_once) / n).sqrt()).all()
    assert (times.mean(0) * at_once - 1).abs().le(4 * spread).all()


@pytest.mark.parametrize(("count", "accepted"), [(1, 2), (2, 2), (3, 3), (4, 5), (5, 5)])
def test_a_pass_is_finished(count: int, accepted: int) -> None:
    waiting = torch.tensor([0.2, 1.5, 0.9, 3.4, 3.1], dtype=torch.float64)
    mask = _first_passes(waiting.log(), count)
    assert mask.tolist() == [time <= sorted([0.2, 0.9, 1.5, 3.1, 3.4])[accepted - 1] for time in waiting]


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_svt_clips_and_adds_laplace_noise(round_: Round, generator: torch.Generator, lr: float) -> None:
    n = 200_000
    update = {"a": torch.tensor([0.5, -3.0], dtype=torch.float64).repeat(n // 2) / lr}
    defense = SVTPrivacy(1.0, 1e6, 4.0, gamma=1.0, tau=-1.0, replace=False, lr=lr)
    released = defense.transform_update(update, round_, generator)["a"]
    noise = released - torch.tensor([0.5, -1.0], dtype=torch.float64).repeat(n // 2) / lr
    scale = 2 * 1.0 / 4.0 / lr
    assert defense.released_noise(1) == Noise("laplace", scale)
    assert float(noise.abs().mean()) == pytest.approx(scale, rel=0.01)
    assert float((noise.abs() > 2 * scale).double().mean()) == pytest.approx(math.exp(-2), rel=0.02)
    assert abs(float(noise.mean())) < 5 * 2**0.5 * scale / n**0.5
    shares = {"a": torch.full_like(released, 7.0)}
    assert torch.equal(defense.simulate(shares, {"a": released})["a"], torch.full_like(released, 1.0 / lr))


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.25, 1.0])
@pytest.mark.parametrize("tau", [-1e3, 1e-6, 1e3])
def test_svt_shares_as_many_as_asked_at_any_threshold(
    round_: Round, generator: torch.Generator, fraction: float, tau: float
) -> None:
    count = math.ceil(fraction * 2001)
    update = {"a": torch.randn(40, 50, generator=generator), "scalar": torch.tensor(0.5)}
    defense = SVTPrivacy(fraction, 1e4, gamma=1e-3, tau=tau, replace=False)
    released = defense.transform_update(update, round_, generator)
    shared = int((released["a"] != 0).sum())
    # the entry without dimensions may be one of them
    assert shared in (count, count - 1)
    assert float(released["scalar"]) == 0.5
    fewer = SVTPrivacy(fraction, 1e4, gamma=1e-3, tau=tau).transform_update(update, round_, generator)
    assert int((fewer["a"] != 0).sum()) <= count


def test_a_high_threshold_still_prefers_large_entries(round_: Round, generator: torch.Generator) -> None:
    update = {"a": torch.linspace(0, 1, 1000)}
    for tau in (1.05, 1.2, 2.0, 200.0):
        released = SVTPrivacy(0.1, 1e6, 1e6, gamma=1.0, tau=tau, replace=False).transform_update(
            update, round_, generator
        )
        assert int((released["a"][850:] != 0).sum()) == 100


@pytest.mark.parametrize(
    ("names", "gone"),
    [
        (["trunk.stem.weight"], lambda name: name == "trunk.stem.weight"),
        (["head.weight", "head.bias"], lambda name: name.startswith("head")),
        ("bias$", lambda name: name.endswith("bias")),
        ("head|stem", lambda name: "head" in name or "stem" in name),
    ],
)
def test_excluded_variables(
    model: Backbone,
    update: Update,
    round_: Round,
    generator: torch.Generator,
    names: list[str] | str,
    gone: Callable[[str], bool],
) -> None:
    if isinstance(names, list):
        names = [name if name in update else next(iter(update)) for name in names]
    defense = ExcludedVariables(names)
    assert defense.prepare(model) is model
    chosen = {name for name in update if (name in names if isinstance(names, list) else gone(name))}
    assert 0 < len(chosen) < len(update)
    for released in (defense.transform_update(update, round_, generator), defense.simulate(update, update)):
        assert all(torch.equal(value, torch.zeros_like(value)) == (name in chosen) for name, value in released.items())
        assert all(released[name] is update[name] for name in update if name not in chosen)


@pytest.mark.parametrize("names", [["head.weight", "haed.bias"], "^haed"])
def test_variables_that_the_model_lacks_are_refused(model: Backbone, names: list[str] | str) -> None:
    with pytest.raises(ConfigError, match=r"names '\^?haed.*', but the model's variables are .*head\.bias"):
        ExcludedVariables(names).prepare(model)
    with pytest.raises(ConfigError, match="haed"):
        Chain([ExcludedVariables(names)]).prepare(model)
