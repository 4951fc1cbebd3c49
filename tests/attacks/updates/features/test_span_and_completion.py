"""Row spaces of whole and of incomplete gradients, and features from null vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import GELU, RELU, Activation
from lit_recon.attacks.updates.features.fit_everywhere import complete
from lit_recon.attacks.updates.features.layer import LayerGradient, observed_entries
from lit_recon.attacks.updates.features.moments import weight_span
from lit_recon.attacks.updates.features.starts import null_vector_start

Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]


def low_rank(m: int, d: int, r: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.nn.functional.normalize(torch.randn(r, d, generator=generator, dtype=torch.float64), dim=1)
    return torch.randn(m, r, generator=generator, dtype=torch.float64) @ features, features


def outside(features: Tensor, basis: Tensor) -> float:
    return float((features - features @ basis @ basis.T).norm(dim=1).max())


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)], ids=["more neurons than features", "more features"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_span_up_to_rounding(dtype: torch.dtype, bound: float, shape: tuple[int, int]) -> None:
    gradient, features = low_rank(*shape, 5)
    basis = weight_span(gradient.to(dtype).double(), 5)
    assert outside(features, basis) < bound
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=torch.float64))


def test_rank_is_read_off_the_gap() -> None:
    gradient, features = low_rank(300, 40, 3)
    assert weight_span(gradient.float().double(), 6).shape == (40, 3)
    # noise fills all directions, and no gap is taken for one
    noise = 0.5 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert weight_span(gradient + noise, 6).shape == (40, 6)
    assert outside(features, weight_span(gradient, 40)) < 1e-12
    wide, features = low_rank(40, 300, 3)
    assert weight_span(wide.float().double(), 6).shape == (300, 3)
    assert outside(features, weight_span(wide, 6)) < 1e-12


def idle(gradient: Tensor, rows: slice, columns: slice) -> Tensor:
    changed = gradient.clone()
    changed[rows] = 0
    changed[:, columns] = 0
    return changed


@pytest.mark.parametrize("activation", [RELU, GELU], ids=lambda a: a.name)
def test_masks_show_sparsity_but_not_what_is_idle_by_itself(build: Build, activation: Activation) -> None:
    seen, _, _ = build(activation, n=3, d=20, m=64)
    seen = replace(
        seen, weight_gradient=torch.ones_like(seen.weight_gradient), head_gradient=torch.ones_like(seen.head_gradient)
    )
    assert observed_entries(seen) == (None, None)
    # a feature that nobody has, and a class without a derivative
    assert observed_entries(
        replace(
            seen,
            weight_gradient=idle(seen.weight_gradient, slice(0), slice(3, 4)),
            head_gradient=idle(seen.head_gradient, slice(2), slice(0)),
        )
    ) == (None, None)
    # neurons that nobody activates are silent in both gradients, and only behind a kink
    silent = replace(
        seen,
        weight_gradient=idle(seen.weight_gradient, slice(20), slice(0)),
        head_gradient=idle(seen.head_gradient, slice(0), slice(20)),
    )
    assert (observed_entries(silent) == (None, None)) is not activation.smooth
    pruned = replace(seen, weight_gradient=silent.weight_gradient)
    mask = observed_entries(pruned).layer
    assert mask is not None
    assert torch.equal(mask, pruned.weight_gradient != 0)
    kept = torch.rand(10, 64, generator=torch.Generator().manual_seed(0)) > 0.1
    dropped = observed_entries(replace(seen, head_gradient=seen.head_gradient * kept))
    assert dropped.layer is None
    assert dropped.head is not None
    assert torch.equal(dropped.head, kept)


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.7])
def test_completion_is_exact_where_enough_is_left(missing: float) -> None:
    gradient, features = low_rank(400, 50, 4)
    observed = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(2)) >= missing
    found = complete(gradient * observed, observed, 4)
    assert found.residual < 1e-6
    assert outside(features, found.basis) < 1e-5
    rows = found.known
    assert rows.double().mean() > 0.9
    error = found.projected[rows] @ found.basis.T - gradient[rows]
    assert error.norm() < 1e-5 * gradient.norm()


def test_completion_of_almost_nothing_stays_finite() -> None:
    gradient, _ = low_rank(60, 20, 3)
    observed = torch.zeros_like(gradient, dtype=torch.bool)
    observed[torch.arange(10), torch.arange(10)] = True
    found = complete(gradient * observed, observed, 3, sweeps=5)
    assert found.basis.isfinite().all()
    assert found.projected.isfinite().all()


def sparse_mixture(m: int, r: int, active: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    derivatives = torch.randn(m, r, generator=generator, dtype=torch.float64)
    derivatives *= torch.rand(m, r, generator=generator) < active
    directions = torch.nn.functional.normalize(torch.randn(r, r, generator=generator, dtype=torch.float64), dim=1)
    return derivatives @ directions, directions


@pytest.mark.parametrize("r", [1, 3, 6])
def test_null_vectors_find_all_directions(r: int) -> None:
    projected, directions = sparse_mixture(800, r, active=0.5)
    found = null_vector_start(projected)
    assert found is not None
    assert (found @ directions.T).abs().amax(dim=0).min() > 1 - 1e-8


def test_null_vectors_give_up() -> None:
    projected, _ = sparse_mixture(300, 4, active=1.0)
    assert null_vector_start(projected, max_samples=4000) is None
    assert null_vector_start(projected[:2], max_samples=4000) is None


def test_null_vectors_of_nothing_are_not_found() -> None:
    assert null_vector_start(torch.zeros(50, 3, dtype=torch.float64)) is None
