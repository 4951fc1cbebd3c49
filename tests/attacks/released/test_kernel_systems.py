"""Systems solved in blocks have the solution of the whole matrix, and take no more memory than they state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from lit_recon.attacks.released.base import Background
from lit_recon.attacks.released.gaussian_kernel import GaussianKernel
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.kernel_systems import BlockSolver, ConjugateGradients, KernelSystem, Layout
from lit_recon.errors import ConfigError, ShapeError

K, P, PIXELS, CLASSES = 230, 40, 9, 3
D = PIXELS + CLASSES
#: Small blocks and a preconditioner that leaves something to do.
SMALL = BlockSolver(block=64, centers=40)


@pytest.fixture(scope="module")
def shadows() -> tuple[Tensor, Tensor, Tensor]:
    """Differences in which images and labels are mixed with noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (K,), generator=generator)
    images = torch.rand(K, 1, 3, 3, generator=generator) * 0.5 + labels[:, None, None, None] / 6
    seen = torch.cat([images.flatten(1), torch.nn.functional.one_hot(labels, CLASSES).float()], dim=1)
    mixed = seen @ torch.randn(D, P, generator=generator) + 0.1 * torch.randn(K, P, generator=generator)
    return 1e-3 * mixed, images, labels


def iterative(solver: BlockSolver, k: int = K, p: int = P, d: int = D) -> BlockSolver:
    """With a little less memory than a factorization takes."""
    n_bytes = BlockSolver(memory_gib=1e3, block=solver.block).layout(k, p, d).n_bytes
    return BlockSolver((n_bytes - 1) / 2**30, solver.block, solver.centers, solver.tolerance, solver.max_steps)


def system(differences: Tensor, kept: int | None, ridge: float, solver: BlockSolver = SMALL) -> KernelSystem:
    """By conjugate gradients with so many blocks in memory and 5 columns at a time; None: by a factorization."""
    if kept is None:
        return solver.system(differences, 0.7, ridge, D)
    kernel = GaussianKernel(differences, solver.block, kept)
    return ConjugateGradients(kernel, 0.7, ridge, Layout(False, 5, kept, 0), solver)


WAYS = pytest.mark.parametrize("kept", [None, 0, 5, 10], ids=["factorization", "anew", "partly kept", "kept"])


@WAYS
@pytest.mark.parametrize("ridge", [1e-5, 1e-2, 10.0])
def test_the_solution_is_that_of_the_whole_matrix(
    shadows: tuple[Tensor, Tensor, Tensor], kept: int | None, ridge: float
) -> None:
    solved = system(shadows[0], kept, ridge)
    kernel = solved.kernel.times(torch.eye(K, dtype=torch.float64)).numpy()
    matrix = kernel + ridge * np.eye(K)
    values = torch.rand(K, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    values[:, 3] = 0  # a pixel that is the same in all images
    wanted = values.numpy()
    expected = scipy.linalg.solve(matrix, wanted, assume_a="pos")
    found = solved.solve_(values.clone()).numpy()
    residual = np.linalg.norm(matrix @ found - wanted, axis=0) / np.linalg.norm(wanted, axis=0).clip(1e-9)
    assert residual.max() < (1e-9 if kept is None else 1e-5)
    assert solved.facts["kernel_residual"] == pytest.approx(residual.max(), rel=1e-3, abs=1e-9)
    np.testing.assert_allclose(kernel @ found, kernel @ expected, atol=1e-9 if kept is None else 2e-5)
    explained = solved.explained(torch.from_numpy(kernel[:9])).numpy()
    exact = np.einsum("mk,km->m", kernel[:9], scipy.linalg.solve(matrix, kernel[:, :9], assume_a="pos"))
    np.testing.assert_allclose(explained, exact, atol=1e-9 if kept is None else 1e-5)


@WAYS
def test_kernel_ridge_regression_in_blocks_is_that_of_another_library(
    shadows: tuple[Tensor, Tensor, Tensor], kept: int | None
) -> None:
    from sklearn.kernel_ridge import KernelRidge as Reference

    differences, images, labels = shadows
    directions = (differences.double() / differences.double().norm(dim=1, keepdim=True)).numpy()
    distances = ((directions[:200, None] - directions[None, :200]) ** 2).sum(2)
    reference = Reference(alpha=1e-2, kernel="rbf", gamma=1 / (0.7 * distances.mean()))
    mean = images[:200].flatten(1).mean(0).double().numpy()
    reference.fit(directions[:200], images[:200].flatten(1).double().numpy() - mean)
    expected = (reference.predict(directions[200:]) + mean).clip(0, 1)
    solver = SMALL if kept is None else iterative(SMALL, 200)
    fitted = KernelRidge([0.7], [1e-2], 100, solver=solver).fitted(differences[:200], images[:200], labels[:200], 3)
    found = fitted.reconstruct(differences[200:])
    # Directions are float32, and conjugate gradients have a tolerance of 1e-5; measured 1e-5.
    np.testing.assert_allclose(found.images.flatten(1).numpy(), expected, atol=1e-4)
    assert (found.labels == labels[200:]).float().mean() > 0.8


def test_blocks_change_nothing_but_rounding(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    whole = KernelRidge([1.0], [1e-4], 100).fitted(*shadows, CLASSES)
    assert whole.notes == ()
    assert whole.facts.keys() == {"bandwidth", "ridge", "validation_mse"}
    seen = shadows[0][:20] + 1e-4
    alone = whole.reconstruct(seen)
    for solver, way in {SMALL: "by a Cholesky factorization", iterative(SMALL): "by conjugate gradients"}.items():
        fitted = KernelRidge([1.0], [1e-4], 100, solver=solver).fitted(*shadows, CLASSES)
        found = fitted.reconstruct(seen)
        torch.testing.assert_close(found.images, alone.images, rtol=0, atol=1e-4)
        torch.testing.assert_close(found.uncertainty, alone.uncertainty, rtol=0, atol=1e-4)
        assert torch.equal(found.labels, alone.labels)
        (note,) = fitted.notes
        assert way in note
        assert f"at most {fitted.system.layout.gib} GiB" in note
        assert f"residual is {fitted.facts['kernel_residual']:.0e}." in note
        assert fitted.facts["kernel_residual"] < solver.tolerance
        assert {name: fitted.facts[name] for name in whole.facts} == whole.facts
        again = KernelRidge([1.0], [1e-4], 100, solver=solver).fitted(*shadows, CLASSES).reconstruct(seen)
        assert torch.equal(again.images, found.images)
        assert torch.equal(again.uncertainty, found.uncertainty)


def test_a_smaller_tolerance_comes_nearer(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    exact = system(shadows[0], None, 1e-3)
    values = torch.rand(K, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    expected, steps = exact.solve_(values.clone()), []
    for tolerance in (1e-2, 1e-6, 1e-10):
        solved = system(shadows[0], 10, 1e-3, BlockSolver(block=64, centers=40, tolerance=tolerance))
        left = exact.kernel.times(solved.solve_(values.clone()) - expected)
        assert (left.norm(dim=0) <= tolerance * values.norm(dim=0)).all()
        assert 0.1 * tolerance < solved.facts["kernel_residual"] <= tolerance  # no more steps than it takes
        steps.append(solved.facts["kernel_steps"])
    assert steps == sorted(set(steps))


def test_the_preconditioner_saves_steps(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    steps = []
    for centers in (1, 40, K):
        solved = system(shadows[0], 10, 1e-4, BlockSolver(block=64, centers=centers))
        solved.solve_(torch.rand(K, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5)
        steps.append(solved.facts["kernel_steps"])
    assert steps[0] > 1.5 * steps[1] > 10
    assert steps[2] <= 3  # all columns of the kernel are the kernel


def test_a_solution_that_is_not_there_is_never_returned(
    shadows: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.ones(K, D, dtype=torch.float64)
    few = system(shadows[0], 0, 1e-5, BlockSolver(block=64, centers=2, max_steps=3))
    with pytest.raises(
        ConfigError, match=r"left a relative residual of \de-\d\d after 3 steps, above solver.tolerance"
    ):
        few.solve_(values.clone())
    with pytest.raises(ConfigError, match=r"after 3 steps"):
        few.explained(torch.ones(2, K, dtype=torch.float64))
    with pytest.raises(ConfigError, match="left a relative residual of nan"):
        system(shadows[0], 0, 1e-2).solve_(values * torch.nan)
    # Steps that end too early, whatever they take their residual for, are not believed.
    monkeypatch.setattr(ConjugateGradients, "_descend_", lambda self, found, left, lengths, most: most)
    with pytest.raises(ConfigError, match=r"left a relative residual of 1e\+00 after 500 steps"):
        system(shadows[0], 0, 1e-2).solve_(values.clone())


def test_singular_kernels_are_refused_either_way(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    twice = shadows[0][:100].repeat(2, 1)
    with pytest.raises(ShapeError, match="the kernel of 200 shadow models is singular at a ridge of 1e-18: raise"):
        SMALL.system(twice, 0.7, 1e-18, D)
    # Seen by the preconditioner, and by a step where that has too few centers; a ridge below 0 stands for rounding.
    values = torch.rand(200, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    for ridge, centers in ((-2.0, 40), (-0.05, 3)):
        solver = BlockSolver(block=64, centers=centers)
        with pytest.raises(ShapeError, match="the kernel of 200 shadow models is singular at a ridge of"):
            ConjugateGradients(GaussianKernel(twice, 64), 0.7, ridge, Layout(False, 5, 0, 0), solver).solve_(values)


@pytest.mark.parametrize("d", [1, 20, 800, 3_100])
@pytest.mark.parametrize(("k", "p"), [(3, 5), (3_000, 8_000), (16_000, 8_000), (54_000, 55_000)])
def test_no_layout_takes_more_than_it_may(k: int, p: int, d: int) -> None:
    ways = []
    for memory_gib in (0.03, 0.1, 0.5, 1, 2, 4, 8, 16, 32):
        try:
            layout = BlockSolver(memory_gib).layout(k, p, d)
        except ConfigError as error:
            assert "takes at least" in str(error)  # noqa: PT017 - some are refused, some not
            ways.append(0)
            continue
        assert layout.n_bytes <= memory_gib * 2**30
        assert 1 <= layout.columns <= d
        blocks = -(-k // 2_048)
        assert 0 <= layout.kept <= blocks * (blocks + 1) // 2
        ways.append(2 if layout.direct else 1)
        # What nobody could do without: the outputs, and half the matrix in float64 or what is kept of it in float32.
        assert layout.n_bytes > 8 * k * d + (4 * k**2 if layout.direct else layout.kept * 4 * 2_048**2)
    assert ways == sorted(ways)
    assert ways[-1] == 2


def test_the_default_takes_the_largest_shadow_sets_of_the_literature() -> None:
    assert BlockSolver().layout(16_000, 55_000, 3_082).direct
    assert not BlockSolver().layout(54_000, 55_000, 3_082).direct
    # With more memory all products are kept, and then steps on few columns at a time cost nothing.
    more = BlockSolver(11).layout(54_000, 55_000, 3_082)
    assert more.kept == 27 * 28 // 2
    assert 32 <= more.columns < 3_082


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"memory_gib": 0.0}, "memory_gib must be above 0"),
        ({"tolerance": 0.0}, "tolerance between 0 and 1"),
        ({"tolerance": 1.0}, "tolerance between 0 and 1"),
        ({"block": 0}, "solver.block, solver.centers and solver.max_steps must be at least 1"),
        ({"centers": 0}, "must be at least 1"),
        ({"max_steps": 0}, "must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        BlockSolver(**arguments)  # type: ignore[arg-type]


def test_too_little_memory_is_refused_before_the_work_begins(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    expected = (
        r"230 shadow models with 40 weights and 12 outputs takes at least [\d.]+ GiB .*; got solver.memory_gib=0.01"
    )
    with pytest.raises(ConfigError, match=expected) as refused:
        KernelRidge(solver=BlockSolver(0.01)).fitted(*shadows, CLASSES)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"choice .* n_validation=230 .*lower n_validation"):
        KernelRidge(solver=BlockSolver(0.028, block=2, centers=1)).fitted(
            shadows[0].repeat(1, 1_000), *shadows[1:], CLASSES
        )


def test_a_long_solution_says_how_far_it_is(shadows: tuple[Tensor, Tensor, Tensor]) -> None:
    told: dict[str, list[int]] = {}

    def announce(total: int, label: str, unit: str):  # type: ignore[no-untyped-def]
        told[label] = [total, 0]

        def advance(n: int) -> None:
            told[label][1] += n

        return advance

    for solver in (SMALL, iterative(SMALL)):
        told.clear()
        bound = KernelRidge([1.0], [1e-2], 100, solver=solver).bind(Background(announce=announce))
        layout = bound.fitted(*shadows, CLASSES).system.layout
        assert len(told) == 2
        assert all(f"230 models, up to {layout.gib} GiB" in label for label in told)
        assert all(total == done for total, done in told.values())
    told.clear()
    KernelRidge([1.0], [1e-2], 100).bind(Background(announce=announce)).fitted(*shadows, CLASSES)
    assert told == {}


#: Prints by which way, how much more memory a fit and reconstructions take than was taken before, and what was stated.
MEASURED = """
import sys, torch
from benchmarks.record import status_mib
from lit_recon.attacks.released import KernelRidge
from lit_recon.attacks.released.kernel_systems import BlockSolver

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
differences = torch.randn(4_000, 64, generator=generator)
images, labels = torch.rand(4_000, 1, 8, 8, generator=generator), torch.randint(10, (4_000,), generator=generator)

def stated(n, memory_gib):
    solver = BlockSolver(memory_gib, block=256, centers=100, tolerance=5e-2)
    attack = KernelRidge([1.0], [1.0], 200, solver=solver).fitted(differences[:n], images[:n], labels[:n], 10)
    attack.reconstruct(differences[:80] + 0.1)
    return attack.system.layout

stated(300, 1.0)  # what libraries take at their first use
before = status_mib("VmHWM")
layout = stated(4_000, float(sys.argv[1]))
print(layout.direct, status_mib("VmHWM") - before, layout.n_bytes / 2**20)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read where Linux has it")
@pytest.mark.parametrize(("memory_gib", "direct"), [(0.11, "True"), (0.065, "False")])
def test_no_more_memory_is_taken_than_stated(memory_gib: float, direct: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", MEASURED, str(memory_gib)]
    way, taken, stated = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert way == direct
    # Nearly all of what is stated is taken, and no more; the whole matrix in float64 alone would be more.
    assert 0.5 * float(stated) < float(taken) <= float(stated) <= memory_gib * 2**10
    assert float(stated) < 8 * 4_000**2 / 2**20
