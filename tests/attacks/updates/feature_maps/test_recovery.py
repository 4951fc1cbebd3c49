"""Maps from a convolution's gradient, against the maps that the tests' own images cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import MapRecovery
from lit_recon.attacks.updates.feature_maps import recovery
from lit_recon.attacks.updates.feature_maps.convolutions import find_convolutions
from lit_recon.attacks.updates.feature_maps.matching import InputMap
from lit_recon.attacks.updates.feature_maps.recovery import unfit
from lit_recon.defenses import Chain, Defense, GaussianNoise, GradientPruning
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.records import Knowledge
from tests.attacks.updates.feature_maps.networks import Mode, backbone, observed


def worst_angle(found: Tensor, truth: Tensor) -> float:
    """Largest 1 - cos of matched maps, both `(n, d)` of unit norm; 2 where two maps took the same match."""
    cosines = truth.double() @ found.flatten(1).T
    matched = cosines.argmax(dim=1)
    return 1 - float(cosines.max(dim=1).values.min()) if len(matched.unique()) == len(truth) else 2.0


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_maps_are_exact(photographs: Tensor, n: int, mode: Mode) -> None:
    seen = observed(photographs[:n], mode=mode)
    found = MapRecovery()(seen)
    truth = InputMap(seen, found.convolution.name, mode)(photographs[:n])
    assert worst_angle(found.maps, truth) < 1e-7  # measured 1e-14 to 1e-9; the truth itself is of single precision
    assert found.outside < 1e-6
    assert found.next_outside > 100 * found.outside
    assert found.negative < 1e-3


def test_the_layer_nearest_to_the_image_is_taken(photographs: Tensor) -> None:
    assert MapRecovery()(observed(photographs[:1])).convolution.name == "trunk.blocks.4.conv2"
    # five maps have more patches than the third stage has channels; the fourth is entered by a kernel in steps
    assert MapRecovery()(observed(photographs[:5])).convolution.name == "trunk.blocks.6.conv1"
    # without fixed statistics nobody knows what stands behind that kernel
    assert MapRecovery()(observed(photographs[:5], mode="train")).convolution.name == "trunk.blocks.6.conv2"


def test_what_follows_counts_with_its_residual(photographs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigenvalue that has not converged may be as large as those of the maps."""
    seen, real = observed(photographs[:1]), recovery.leading_eigenspace
    assert MapRecovery()(seen).next_outside > 0

    def unsure(*given: Any, **settings: Any) -> Any:
        found = real(*given, **settings)
        return found._replace(residuals=torch.full_like(found.residuals, 1.0))

    monkeypatch.setattr(recovery, "leading_eigenspace", unsure)
    with pytest.raises(UnsupportedModelError, match="maps have their patches in its gradient"):
        MapRecovery()(seen)


@pytest.mark.slow
def test_a_layer_with_as_many_patches_as_channels_comes_last(photographs: Tensor) -> None:
    model = backbone(width=32)
    assert MapRecovery()(observed(photographs[:2], model)).convolution.name == "trunk.blocks.6.conv1"
    third = ["trunk.blocks.5.conv1", "trunk.blocks.5.conv2"]
    assert MapRecovery(third)(observed(photographs[:2], model)).convolution.name == third[0]
    assert MapRecovery(["trunk.blocks.6.conv2", *third])(observed(photographs[:2], model)).convolution.name[-7] == "6"
    # statistics of the batch leave one singular value, which shows the rank
    found = MapRecovery()(observed(photographs[:2], model, mode="train"))
    assert found.convolution.name in ("trunk.blocks.4.conv2", *third)
    # with hidden entries its rank shows nothing
    pruned = observed(photographs[:2], model, defense=GradientPruning(0.5))
    pruned = replace(pruned, defense=GradientPruning(0.5), knowledge=Knowledge(defense=True))
    with pytest.raises(UnsupportedModelError, match="entries of its gradient are hidden, as many patches as channels"):
        MapRecovery(third, completion="never")(pruned)


def test_a_layer_can_be_asked_for(photographs: Tensor) -> None:
    seen = observed(photographs[:2])
    found = MapRecovery(["trunk.blocks.7.conv2"])(seen)
    assert found.convolution.name == "trunk.blocks.7.conv2"
    assert found.maps.shape == (2, 128, 4, 4)
    with pytest.raises(ConfigError, match="no plain convolution"):
        MapRecovery(["trunk.blocks.9.conv2"])(seen)
    with pytest.raises(ConfigError, match="at least one layer"):
        MapRecovery([])


def test_group_normalization_is_no_obstacle(photographs: Tensor) -> None:
    seen = observed(photographs[:3], backbone(norm="group"))
    found = MapRecovery()(seen)
    truth = InputMap(seen, found.convolution.name, "eval")(photographs[:3])
    assert worst_angle(found.maps, truth) < 1e-7


@pytest.mark.parametrize("defense", [GaussianNoise(0.01), Chain([GradientPruning(0.5), GaussianNoise(0.01)])])
def test_a_defended_gradient_is_refused_with_its_reasons(photographs: Tensor, defense: Defense) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no convolution determines the maps.*rank"):
        MapRecovery()(observed(photographs[:3], defense=defense))


def test_too_large_a_batch_is_refused_before_any_compute(photographs: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="128 channels allow batches of 8"):
        MapRecovery()(observed(photographs[:9]))


@pytest.mark.parametrize("activation", ["gelu", "elu"])
def test_behind_smooth_activations_the_span_of_the_maps_is_found(
    photographs: Tensor, activation: Literal["gelu", "elu"]
) -> None:
    seen = observed(photographs[:3], backbone(activation))
    found = MapRecovery()(seen)
    assert not found.separated
    basis = found.maps.flatten(1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(3, dtype=torch.float64))
    input_map = InputMap(seen, found.convolution.name, "eval").doubled()
    inside, other = (input_map(images.double()) @ basis.T for images in (photographs[:3], photographs[3:4]))
    assert float((1 - inside.square().sum(1)).max()) < 1e-7  # at most 4e-9 measured
    assert float(1 - other.square().sum()) > 0.05


def test_a_vanished_gradient_is_refused(photographs: Tensor) -> None:
    seen = observed(photographs[:2])
    for value in seen.update.values():
        value.zero_()
    with pytest.raises(UnsupportedModelError, match="its gradient is zero"):
        MapRecovery()(seen)


def test_convolutions_are_listed_as_images_pass_them(photographs: Tensor) -> None:
    found = {convolution.name: convolution for convolution in find_convolutions(observed(photographs[:1]))}
    assert list(found)[:3] == ["trunk.stem.0", "trunk.blocks.0.conv1", "trunk.blocks.0.conv2"]
    entrance = found["trunk.blocks.6.conv1"]
    assert (entrance.shape, entrance.places, entrance.stride) == ((64, 8, 8), 16, (2, 2))
    assert unfit(entrance, 1) == "its kernel skips entries"
    assert unfit(found["trunk.blocks.6.conv2"], 8) is None
    assert not found["trunk.stem.0"].sparse
