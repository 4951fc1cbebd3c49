"""The mean of several reconstructors, and features of unit variance for one of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor
from lit_recon.attacks.released.ensemble import Ensemble
from lit_recon.attacks.released.gaussian_kernel import unit_length
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.networks.perceptrons import PrincipalComponents
from lit_recon.errors import ConfigError, ShapeError


@dataclass
class Constant(Reconstructor):
    """Finds one grey and one label everywhere."""

    grey: float
    label: int

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> None:
        """There is nothing to learn."""

    def prepare(self, background: Background) -> None:
        self.grey /= 2

    @property
    def facts(self) -> dict[str, float]:
        return {"grey": self.grey}

    @property
    def notes(self) -> tuple[str, ...]:
        return ("It is constant.",)

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        m = len(differences)
        images = torch.full((m, 1, 2, 2), self.grey)
        labels = torch.full((m,), self.label)
        return ReconstructedTargets(images, labels, torch.full((m,), self.grey).double())


def fitted(*members: Reconstructor) -> Reconstructor:
    return Ensemble(members).fitted(torch.zeros(3, 2), torch.zeros(3, 1, 2, 2), torch.zeros(3).long(), 4)


def test_images_are_averaged_and_labels_voted_on() -> None:
    ensemble = fitted(Constant(0.1, 3), Constant(0.2, 1), Constant(0.6, 1))
    found = ensemble.reconstruct(torch.zeros(5, 2))
    torch.testing.assert_close(found.images, torch.full((5, 1, 2, 2), 0.3))
    torch.testing.assert_close(found.uncertainty, torch.full((5,), 0.3).double(), rtol=0, atol=1e-7)
    assert found.labels.tolist() == [1] * 5
    assert ensemble.facts == {"member_0_grey": 0.1, "member_1_grey": 0.2, "member_2_grey": 0.6}
    assert ensemble.notes == ("It is constant.",)


def test_of_equal_votes_the_earlier_one_counts() -> None:
    for labels, expected in (([3, 1], 3), ([1, 0, 0, 1], 1), ([3, 1, 1, 0, 3], 3), ([2, 1, 1, 3, 3], 1)):
        members = [Constant(0.1, label) for label in labels]
        assert fitted(*members).reconstruct(torch.zeros(2, 2)).labels.tolist() == [expected] * 2


def test_what_is_known_reaches_the_members() -> None:
    informed = Ensemble([Constant(0.2, 0), Constant(0.4, 0)]).bind(Background())
    assert isinstance(informed, Ensemble)
    assert [member.grey for member in informed.members if isinstance(member, Constant)] == [0.1, 0.2]


def test_equal_members_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    differences, images = torch.randn(20, 6, generator=generator), torch.rand(20, 1, 2, 2, generator=generator)
    labels = torch.arange(20) % 3
    alone = KernelRidge().fitted(differences, images, labels, 3).reconstruct(differences + 0.1)
    twice = Ensemble([KernelRidge()] * 2).fitted(differences, images, labels, 3).reconstruct(differences + 0.1)
    torch.testing.assert_close(alone.images, twice.images)
    assert torch.equal(alone.labels, twice.labels)


def test_one_member_is_no_ensemble() -> None:
    with pytest.raises(ConfigError, match="two or more members; got 1"):
        Ensemble([KernelRidge()])


def test_components_are_uncorrelated_with_unit_variance() -> None:
    differences = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    components = PrincipalComponents.fitted(differences, 5)
    features = components(3 * differences)
    assert features.shape == (50, 5)
    torch.testing.assert_close(torch.cov(features.T), torch.eye(5), rtol=0, atol=1e-4)
    # They are the leading eigenvectors of the covariance.
    values, vectors = torch.linalg.eigh(torch.cov(unit_length(differences).T.double()))
    expected = (unit_length(differences) - unit_length(differences).mean(0)).double() @ vectors[:, -1]
    expected /= values[-1] ** 0.5
    torch.testing.assert_close(features[:, 0].double().abs(), expected.abs(), rtol=0, atol=1e-4)


def test_components_that_do_not_exist_are_left_out() -> None:
    basis = torch.linalg.qr(torch.randn(8, 2, generator=torch.Generator().manual_seed(0))).Q
    angles = torch.linspace(0, 1, 30)[:, None]
    differences = torch.cos(angles) * basis[:, 0] + torch.sin(angles) * basis[:, 1]
    assert PrincipalComponents.fitted(differences, 8)(differences).shape == (30, 2)


def test_differences_of_another_network_are_refused() -> None:
    differences = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ShapeError, match="are they of another network"):
        PrincipalComponents.fitted(differences, 2)(torch.ones(2, 5))
    with pytest.raises(ShapeError, match="two or more different models"):
        PrincipalComponents.fitted(torch.ones(3, 4), 2)
