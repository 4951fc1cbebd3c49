from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, ShadowSizes
from lit_recon.attacks.released.ensemble import Ensemble
from lit_recon.attacks.released.gaussian_kernel import squared_distances, unit_length
from lit_recon.attacks.released.kernel_ridge import KernelRidge, leave_one_out_error
from lit_recon.attacks.released.kernel_systems import BlockSolver
from lit_recon.errors import ConfigError, ShapeError

S, P = 60, 12


@pytest.fixture
def shadows() -> tuple[Tensor, Tensor, Tensor]:
    """Differences that are the image and its label, up to a rotation, noise and an arbitrary length."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (S,), generator=generator)
    images = torch.rand(S, 1, 3, 3, generator=generator) * 0.3 + labels[:, None, None, None] / 4
    seen = torch.cat([images.flatten(1), torch.nn.functional.one_hot(labels, 3).float()], dim=1)
    rotation = torch.linalg.qr(torch.randn(P, P, generator=generator)).Q
    lengths = 10 ** (4 * torch.rand(S, 1, generator=generator) - 6)
    return lengths * seen @ rotation, images, labels


def test_it_is_kernel_ridge_regression(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    from sklearn.kernel_ridge import KernelRidge as Reference

    differences, images, labels = shadows
    fitted = KernelRidge(bandwidths=[0.7], ridges=[1e-3]).fitted(differences[:50], images[:50], labels[:50], 3)
    found = fitted.reconstruct(differences[50:])
    directions = (differences.double() / differences.double().norm(dim=1, keepdim=True)).numpy()
    distances = ((directions[:50, None] - directions[None, :50]) ** 2).sum(2)
    reference = Reference(alpha=1e-3, kernel="rbf", gamma=1 / (0.7 * distances.mean()))
    mean = images[:50].flatten(1).mean(0).double().numpy()
    reference.fit(directions[:50], images[:50].flatten(1).double().numpy() - mean)
    expected = (reference.predict(directions[50:]) + mean).clip(0, 1)
    # Directions are float32; measured 4e-6.
    np.testing.assert_allclose(found.images.flatten(1).numpy(), expected, atol=5e-5)
    assert (found.labels == labels[50:]).float().mean() > 0.8
    assert found.images.shape == (10, 1, 3, 3)


def test_shadow_models_themselves_come_back(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    fitted = KernelRidge(ridges=[1e-7]).fitted(*shadows, 3)
    found = fitted.reconstruct(1e3 * shadows[0])
    torch.testing.assert_close(found.images, shadows[1], rtol=0, atol=1e-3)
    assert torch.equal(found.labels, shadows[2])
    assert found.uncertainty.max() < 1e-5
    far = fitted.reconstruct(-shadows[0])
    assert far.uncertainty.min() > 0.1
    assert far.images.min() >= 0
    assert far.images.max() <= 1


def test_leave_one_out_is_what_leaving_out_gives(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    directions, values = unit_length(shadows[0][:15]), shadows[1][:15].flatten(1).double()
    values = values - values.mean(dim=0)
    kernel = (-squared_distances(directions, directions)).exp()
    residuals = []
    for i in range(15):
        others = [j for j in range(15) if j != i]
        weights = torch.linalg.solve(
            kernel[others][:, others] + 1e-2 * torch.eye(14, dtype=torch.float64), values[others]
        )
        residuals.append(values[i] - kernel[i, others] @ weights)
    expected = float(torch.stack(residuals)[:, :4].square().mean())
    assert leave_one_out_error(kernel, values, 1e-2, 4) == pytest.approx(expected, rel=1e-9)


def test_the_choice_is_the_least_validation_error(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    grid = KernelRidge(bandwidths=[0.01, 0.5, 100.0], ridges=[1e-6, 10.0])
    chosen = grid.fitted(*shadows, 3).facts
    single = [
        KernelRidge(bandwidths=[bandwidth], ridges=[ridge]).fitted(*shadows, 3).facts["validation_mse"]
        for bandwidth in grid.bandwidths
        for ridge in grid.ridges
    ]
    assert chosen["validation_mse"] == min(single)
    assert chosen["bandwidth"] != 0.01
    assert chosen["ridge"] == 1e-6


def test_only_the_first_models_decide(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    part = KernelRidge(n_validation=20).fitted(*(values[:20] for values in shadows), 3).facts
    assert KernelRidge(n_validation=20).fitted(*shadows, 3).facts == part


def test_singular_kernels_are_refused(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    differences, images, labels = shadows
    twice = torch.cat([differences, differences]), torch.cat([images, images]), torch.cat([labels, labels])
    with pytest.raises(ShapeError, match="no bandwidth and ridge gave a kernel"):
        KernelRidge(ridges=[1e-18]).fitted(*twice, 3)
    with pytest.raises(ShapeError, match="singular at a ridge"):
        KernelRidge(ridges=[1e-18], n_validation=60).fitted(*twice, 3)


@pytest.mark.parametrize(
    "arguments", [{"bandwidths": []}, {"bandwidths": [0.0]}, {"ridges": [-1.0]}, {"n_validation": 1}]
)
def test_impossible_settings_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        KernelRidge(**arguments)  # type: ignore[arg-type]


def test_too_many_models_are_refused_before_they_are_trained() -> None:
    sizes = ShadowSizes(60, P, (1, 3, 3), 3)
    KernelRidge().bind(Background(sizes=sizes))
    with pytest.raises(ConfigError, match="at most max_models=59 shadow models; got 60"):
        KernelRidge(max_models=59).bind(Background(sizes=sizes))
    tight = KernelRidge(n_validation=1000, solver=BlockSolver(memory_gib=0.03, block=60, centers=60))
    with pytest.raises(ConfigError, match="memory_gib=0.03: raise it, or lower n_validation"):
        tight.bind(Background(sizes=sizes._replace(n=1000)))
    with pytest.raises(ConfigError, match="memory_gib=0.03: raise it, or lower split.shadow"):
        tight.bind(Background(sizes=sizes._replace(n=50_000)))
    nested = Ensemble([KernelRidge(), KernelRidge(max_models=59)])
    with pytest.raises(ConfigError, match="got 60"):
        nested.bind(Background(sizes=sizes))


def test_what_does_not_fit_is_refused(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    differences, images, labels = shadows
    with pytest.raises(ConfigError, match="at most max_models=59 shadow models; got 60"):
        KernelRidge(max_models=59).fitted(*shadows, 3)
    with pytest.raises(ShapeError, match=r"got \(60, 12\), \(59, 1, 3, 3\)"):
        KernelRidge().fitted(differences, images[1:], labels, 3)
    with pytest.raises(ShapeError, match=r"images in \[0, 1\]"):
        KernelRidge().fitted(differences, images + 1, labels, 3)
    with pytest.raises(ShapeError, match="labels must be 0 to 1; got 0 to 2"):
        KernelRidge().fitted(differences, images, labels, 2)
    with pytest.raises(ShapeError, match="must be finite and not zero"):
        KernelRidge().fitted(*shadows, 3).reconstruct(torch.zeros(1, P))
