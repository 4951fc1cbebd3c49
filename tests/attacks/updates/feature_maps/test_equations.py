"""Equations for the input of a convolution, on systems small enough to know the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution
from lit_recon.attacks.updates.feature_maps.equations import Group, Known, Solved, Statistics, _hidden, _with_zeros

#: Side of maps and outputs; output channels.
SIDE, CHANNELS = 5, 12


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sparse(n: int, side: int = SIDE, seed: int = 4) -> Tensor:
    return torch.relu(normal(n, 6, side, side, seed=seed))


def derivative(seed: int, channels: int = CHANNELS) -> Tensor:
    return normal(1, channels, SIDE, SIDE, seed=seed)


def group_of(
    maps: Tensor,
    used: Tensor,
    known: Tensor | None = None,
    noise: float = 0.0,
    stride: int = 1,
    statistics: Statistics | None = None,
) -> Group:
    """The equations for `maps (n, c, h, w)` before a convolution of 3 x 3.

    Args:
        maps: of which the gradient is.
        used: derivative in the output, `(n, channels, rows, columns)`, of which the gradient is.
        known: what the equations take it for; default: the same.
        noise: standard deviation of the noise on the gradient.
        stride: of the convolution.
        statistics: of the norm behind it.
    """
    shape = maps.shape[1], maps.shape[2], maps.shape[3]
    layer = Convolution("layer", shape, used.shape[1], (3, 3), (stride, stride), (1, 1), used[0, 0].numel(), True)
    weight = normal(used.shape[1], shape[0], 3, 3, seed=2)
    exact = Known(layer, weight, None, torch.zeros_like(weight), used, statistics)
    gradient = exact.predicted(maps) + noise * normal(*weight.shape, seed=3)
    one = Known(layer, weight, None, gradient, used if known is None else known, statistics)
    return Group([one], (len(maps), *shape))


@pytest.fixture(scope="module")
def maps() -> Tensor:
    return sparse(1)


def solved(group: Group, start: Tensor | None = None) -> Solved:
    found = group.solve(start)
    assert isinstance(found, Solved)
    return found


def relative(found: Tensor, truth: Tensor) -> float:
    """Relative error up to the scale of every example."""
    found, truth = (torch.nn.functional.normalize(value.flatten(1), dim=1) for value in (found, truth))
    return float((found - truth).norm() / truth.norm())


def test_maps_are_solved_with_their_zeros_and_their_error(maps: Tensor) -> None:
    found = solved(group_of(maps, derivative(1), noise=1e-5))
    assert torch.equal(found.maps > 0, maps > 0)
    assert torch.equal(found.doubtful, maps == 0)
    actual = float((found.maps - maps).norm() / maps.norm())  # 1.2e-6, and 2.5e-6 expected: zeros are known to be zero
    assert actual < found.error < 4 * actual


def test_channels_that_contradict_the_others_lose_their_weight(maps: Tensor) -> None:
    known = derivative(1)
    known[:, :4] = derivative(7)[:, :4]
    found = solved(group_of(maps, derivative(1), known, noise=1e-5))
    assert relative(found.maps, maps) < 1e-5  # measured 1.9e-6
    assert found.error < 1e-5  # measured 3.0e-6


def test_equations_of_which_most_do_not_hold_are_no_evidence(maps: Tensor) -> None:
    known = derivative(1)
    known[:, :7] = derivative(7)[:, :7]
    # the weights settle on five of twelve channels, whose equations these maps satisfy up to 5e-6
    assert solved(group_of(maps, derivative(1), known, noise=1e-5)).error > 0.1  # measured 1.1


def test_an_entry_without_an_equation_is_not_determined(maps: Tensor) -> None:
    used = derivative(1)
    used[..., :2, :2] = 0  # all patches that hold the first entry
    group = group_of(maps, used)
    assert group.fit(group.alike, None) is None
    assert group.solve(None) == "its equations do not determine every entry"


@pytest.mark.parametrize("channels", [3, 4])
def test_hardly_more_equations_than_unknowns_are_enough(maps: Tensor, channels: int) -> None:
    found = solved(group_of(maps, derivative(1, channels), noise=1e-6))
    assert relative(found.maps, maps) < 2e-6  # measured 4.6e-7 and 3.4e-7
    assert found.error < 2e-6  # measured 5.2e-7 and 4.1e-7


def test_negative_maps_are_an_error(maps: Tensor) -> None:
    below = maps.clone()
    below[0, 0, 0, 0] = -0.01 * maps.norm()
    assert solved(group_of(below, derivative(1), noise=1e-6)).error == pytest.approx(0.01, rel=0.02)


def test_dead_channels_of_input_and_output_leave_the_others_known(maps: Tensor) -> None:
    dead, used = maps.clone(), derivative(1)
    dead[:, 2], used[:, 5] = 0, 0
    found = solved(group_of(dead, used))
    assert relative(found.maps, dead) < 1e-12  # measured 6e-16
    assert torch.equal(found.maps > 0, dead > 0)
    assert found.doubtful[:, 2].all()
    assert found.error < 1e-12  # measured 6e-16


def test_rounding_of_a_strong_channel_does_not_drown_the_others(maps: Tensor) -> None:
    used = derivative(1)
    used[:, 0] *= 1e7
    group = group_of(maps, used)
    group.right = group.right.float().double()
    fitted = group.fit(group.alike, None)
    assert fitted is not None
    assert relative(fitted[0], maps) < 5e-6  # measured 9e-7


@pytest.mark.parametrize(("lowest", "kept"), [(0.0, True), (-20.0, False)])
def test_zeros_scatter_as_far_as_the_most_negative_entry(maps: Tensor, lowest: float, kept: bool) -> None:
    noise, group = 1e-6, group_of(maps, derivative(1))
    system = group.system(None)
    spread = noise * torch.linalg.inv(system.T @ system).diagonal().sqrt().view(SIDE, SIDE)
    changed = maps.clone()
    changed[0, 0, 2, 2], changed[0, 1, 1, 1], changed[0, 2, 3, 3] = (
        20 * spread[2, 2],
        lowest * spread[1, 1],
        3 * spread[3, 3],
    )
    found = solved(group_of(changed, derivative(1), noise=noise))
    assert (float(found.maps[0, 0, 2, 2]) > 0) == kept
    assert found.doubtful[0, 0, 2, 2]
    assert found.maps[0, 2, 3, 3] == 0  # within the noise, whatever the lowest entry


@pytest.mark.parametrize("strength", [1.0, 1e4])
@pytest.mark.parametrize("seed", range(4))
def test_the_wrong_zero_is_the_one_without_which_least_squares_leave_least(
    maps: Tensor, seed: int, strength: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    full = derivative(1)
    full[:, 0] *= strength
    positive = torch.rand(full.shape, generator=generator) < 0.5
    used = torch.where(positive, full, 0.0)
    place = int(torch.multinomial(positive[:, 1:].flatten().double(), 1, generator=generator)) + SIDE**2
    known = used.clone()
    known.view(-1)[place] = 0
    group = group_of(maps, used, known, noise=0.03)
    # noise is relative to the gradient of an output channel, like rounding
    group.right[:9] += 0.03 * (strength - 1) * normal(9, 6, seed=5)
    fitted = group.fit(group.alike, None)
    assert fitted is not None
    flips = torch.where(known == 0, full, -full)
    # by brute force: every change of the derivative, and the weighted least squares again
    roots = group.alike[group.owner].sqrt()[:, None]
    basis = torch.linalg.qr(group.system(None) * roots)[0]
    patches = group.known[0].patches(fitted[0])[0].T
    left = []
    for index, flip in enumerate(flips.flatten().tolist()):
        channel, position = divmod(index, SIDE**2)
        rows = fitted[1].clone()
        rows[9 * channel : 9 * channel + 9] -= flip * patches[position].view(6, 9).T
        rows = rows * roots
        left.append(float((rows - basis @ (basis.T @ rows)).square().sum()))
    found = group.wrong_zero(*fitted, flips)
    assert found == int(torch.tensor(left).argmin())
    assert found == place


@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_shows_no_wrong_zero(maps: Tensor, seed: int) -> None:
    full = derivative(1)
    positive = torch.rand(full.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    group = group_of(maps, torch.where(positive, full, 0.0), noise=1e-3)
    fitted = group.fit(group.alike, None)
    assert fitted is not None
    # changes as small as the noise, of which the best explains less than 3 %
    flips = 1e-4 * torch.where(positive, -full, full)
    assert group.wrong_zero(*fitted, flips) is None


# -- behind norms with statistics

NORMS = pytest.mark.parametrize("statistics", [Statistics(None, 1e-5), Statistics(2, 1e-5)], ids=["batch", "group"])


@NORMS
@pytest.mark.parametrize("n", [1, 2])
def test_maps_are_solved_behind_a_norm(statistics: Statistics, n: int) -> None:
    maps, noise = sparse(n), 1e-7
    group = group_of(maps, normal(n, 24, SIDE, SIDE, seed=1), noise=noise, statistics=statistics)
    start = group.start(sparse(n, seed=5))
    assert start is not None
    assert relative(start, maps) < 0.2  # measured 0.013 to 0.1
    fitted = group.fit(group.alike, start)
    assert fitted is not None
    found = solved(group, fitted[0])
    assert relative(found.maps, maps) < 2e-7  # measured 4e-8
    assert 2e-8 < found.error < 5e-7  # measured 8e-8 to 1.3e-7
    assert torch.equal(found.maps > 0, maps > 0)
    assert torch.equal(found.doubtful, maps == 0)


@NORMS
def test_steps_never_explain_less(statistics: Statistics) -> None:
    group = group_of(sparse(1), derivative(1, 24), statistics=statistics)
    for seed in range(5, 9):
        far = 3 * sparse(1, seed=seed)
        fitted = group.fit(group.alike, far)
        assert fitted is not None
        roots = group.alike[group.owner].sqrt()[:, None]
        # measured 0.53 to 0.62 behind statistics of the batch, 2e-7 behind those of the example
        assert float((fitted[1] * roots).norm()) < 0.8 * float((group.residual(far) * roots).norm())


@pytest.mark.parametrize("zeros", [True, False])
def test_a_hidden_constant_is_known_from_the_zeros(zeros: bool) -> None:
    maps = sparse(1, side=6)
    if not zeros:
        maps[:, :, ::2, ::2] += 1 + sparse(1, side=3, seed=8)
    # a kernel of stride two meets the entries of even row and column with one of its entries only, at every place
    group = group_of(maps, normal(1, 24, 3, 3, seed=1), noise=1e-7, stride=2, statistics=Statistics(None, 1e-5))
    start = group.start(maps)
    assert start is not None
    fitted = group.fit(group.alike, start)
    assert fitted is not None
    found = group.solve(fitted[0])
    if zeros:
        assert isinstance(found, Solved)
        assert relative(found.maps, maps) < 1e-6  # measured 1.1e-7
        assert found.error < 1e-6  # measured 2.1e-7
        assert torch.equal(found.maps > 0, maps > 0)
    else:
        assert found == "a norm hides a constant of its input, and the zeros do not show it"


def factor_of(null: Tensor, values: list[float]) -> Tensor:
    """A root of a matrix with orthonormal eigenvectors `null (k, 8)` of these eigenvalues; others from 1 to 2."""
    basis = torch.linalg.qr(torch.cat([null, normal(8 - len(null), 8, seed=0)]).T)[0]
    scales = torch.cat([torch.tensor(values), torch.linspace(1, 2, 8 - len(null))]).double()
    return basis * scales.sqrt()


@pytest.mark.parametrize("places", [(1, 3, 4, 7), (0, 1, 2), (2, 6), (0, 3, 5, 6, 7)])
def test_a_constant_that_equations_hide_is_found(places: tuple[int, ...]) -> None:
    constant = torch.zeros(8, dtype=torch.float64)
    constant[list(places)] = len(places) ** -0.5
    found = _hidden(factor_of(constant[None], [1e-12]))
    assert isinstance(found, Tensor)
    assert found.nonzero().flatten().tolist() == list(places)
    assert _hidden(factor_of(constant[None], [1e-6])) is None
    # another direction beside it, or in its place, is no constant
    other = normal(8, seed=1)
    other = torch.nn.functional.normalize(other - (other @ constant) * constant, dim=0)
    for null, values in ((torch.stack([constant, other]), [1e-13, 1e-10]), (other[None], [1e-12])):
        assert _hidden(factor_of(null, values)) == "its equations do not determine every entry"


def test_the_lowest_entries_are_zero_where_several_agree() -> None:
    hidden = torch.tensor([True, True, True, True, False])
    columns = torch.tensor([[0.3, 0.9, 0.304, 0.296, 0.7]], dtype=torch.float64).T
    lowered = _with_zeros(columns, hidden, torch.full((5, 1), 1e-3, dtype=torch.float64))
    assert lowered is not None
    torch.testing.assert_close(
        lowered.flatten(), torch.tensor([0, 0.6, 0.004, -0.004, 0.7]).double(), rtol=0, atol=1e-7
    )
    assert _with_zeros(columns, hidden, torch.full((5, 1), 1e-5, dtype=torch.float64)) is None
