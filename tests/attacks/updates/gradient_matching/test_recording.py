"""Functions recorded on a GPU; without one they are called as they are."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.workload import Workload
from lit_recon.attacks.base import Execution
from lit_recon.attacks.updates import DeepImagePrior, Pixels
from lit_recon.attacks.updates.gradient_matching import recording
from lit_recon.attacks.updates.gradient_matching.matching import Matching
from lit_recon.attacks.updates.gradient_matching.recording import DifferentiableRecorded, Recorded

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA kernels")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def polynomial(a: Tensor, b: Tensor | None, c: Tensor) -> Tensor:
    return (a * c.square() if b is None else a * b * c).sum(0)


def random(*shape: int, device: str, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_later_calls_compute_with_their_own_inputs(device: str) -> None:
    recorded = Recorded(lambda pair, more: {"product": pair[0] @ pair[1], "more": more["x"] + 1})
    kept = []
    for shape in ((2, 3), (2, 3), (4, 3), (2, 3)):
        left = random(*shape, device=device, seed=len(kept))
        right, x = random(3, 5, device=device, seed=7), random(2, device=device, seed=8 + len(kept))
        kept.append((recorded((left, right), {"x": x}), left @ right, x + 1))
    assert recorded.refused is None
    for found, product, more in kept:  # no later call overwrites what an earlier one gave
        torch.testing.assert_close(found["product"], product)
        torch.testing.assert_close(found["more"], more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_second", [True, False])
def test_derivatives_are_those_of_the_function(device: str, with_second: bool) -> None:
    recorded = DifferentiableRecorded(polynomial)
    for seed in range(3):
        a, b, c = (random(4, 3, device=device, seed=3 * seed + i).requires_grad_(i != 1) for i in range(3))
        second = b if with_second else None
        along = random(3, device=device, seed=20 + seed)
        found = torch.autograd.grad(recorded(a, second, c), (a, c), along)
        expected = torch.autograd.grad(polynomial(a, second, c), (a, c), along)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(recorded(a, second, c), polynomial(a, second, c))


def test_inputs_that_are_not_used_have_no_gradient() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    DifferentiableRecorded(lambda a, b: 2 * a)(used, unused).sum().backward()
    assert used.grad is not None
    assert used.grad.tolist() == [2, 2]
    assert unused.grad is None


@on_gpu
def test_what_waits_for_the_gpu_is_called_as_it_is() -> None:
    recorded = Recorded(lambda x: x * float(x.sum()))
    for seed in range(2):
        x = random(3, device="cuda", seed=seed)
        torch.testing.assert_close(recorded(x), x * float(x.sum()))
    assert "synchronizing" in str(recorded.refused)
    torch.rand(2, device="cuda")  # the device's random state is as good as before


def test_a_function_that_cannot_be_recorded_is_called_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(recording, "_Graph", Refusing)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    recorded = Recorded(lambda x: 2 * x)
    assert recorded(torch.ones(2)).tolist() == [2, 2]
    assert recorded(torch.zeros(1)).tolist() == [0]
    assert recorded.refused == "RuntimeError: called a synchronizing CUDA operation"


@on_gpu
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_an_attack_on_a_gpu_records_its_iterations(execution: Execution) -> None:
    workload = Workload.build(batch=2, victims=2, width=8, device="cuda")
    for compilation in ("auto", "none"):
        attack, state = workload.attack(execution, compilation, DeepImagePrior(channels=8))  # type: ignore[arg-type]  # a literal
        for _ in range(5):
            attack.advance(state)
        assert not state.matching.refused | attack.parametrization.refused
        assert bool(state.matching._cache) == (compilation == "auto")
        assert bool(attack.parametrization._recorded) == (compilation == "auto")  # type: ignore[attr-defined]  # a DeepImagePrior


@on_gpu
def test_a_recorded_deep_image_prior_draws_and_derives_what_the_launched_one_does() -> None:
    """At the same weights, twice: Adam makes steps of one size of gradients that are nothing but rounding."""
    workload = Workload.build(batch=2, width=8, device="cuda")
    state = workload.attack()[1]
    restart, along = state.problems[0].restart, torch.rand(2, 3, 32, 32, device="cuda")
    prior = DeepImagePrior(channels=8)
    for seed in (0, 1):
        start = prior.start(restart._replace(seed=seed))
        found = []
        for prior.records in (True, False):
            weights = {name: value.clone().requires_grad_() for name, value in start.items()}
            images = prior.images(weights, restart)
            found.append([images.detach(), *torch.autograd.grad(images, list(weights.values()), along)])
        size = max(float(value.norm()) for value in found[1][1:])
        for recorded, launched in zip(*found, strict=True):
            assert (recorded - launched).norm() <= 1e-4 * launched.norm() + 1e-5 * size


@on_gpu
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_recorded_data_term_computes_what_the_launched_one_does(execution: Execution) -> None:
    workload = Workload.build(batch=2, victims=2, width=8, device="cuda")
    states = [workload.attack(execution, compilation)[1] for compilation in ("auto", "none")]  # type: ignore[arg-type]  # a literal
    labels = torch.stack([problem.labels for problem in states[0].problems])
    images = torch.rand(2, 2, 3, 32, 32, device="cuda")
    states[0].matching(torch.rand_like(images), labels, [0, 1])
    found, expected = (state.matching(images, labels, [0, 1]) for state in states)
    torch.testing.assert_close(found.matching, expected.matching)
    torch.testing.assert_close(found.images, expected.images, rtol=1e-3, atol=1e-6)


class FakeGPU:
    """Stands in for `torch.cuda`: a recording is what the function says that its kernels do."""

    Stream = contextlib.nullcontext

    def __init__(self) -> None:
        self.mode: int | str = 0
        self.recording: FakeGPU.CUDAGraph | None = None

    class CUDAGraph:
        work: Callable[[], object]

        def replay(self) -> None:
            self.work()

    @contextlib.contextmanager
    def graph(self, graph: CUDAGraph) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = mode
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    def get_sync_debug_mode(self) -> int | str:
        return self.mode

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    fake = FakeGPU()
    monkeypatch.setattr(FakeGPU, "Stream", lambda self: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(recording.torch, "cuda", fake)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return fake


def test_a_recording_reads_its_own_places_and_gives_copies(gpu: FakeGPU) -> None:
    calls = []

    def double(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        result = 2 * x.detach()
        if gpu.recording is not None:
            gpu.recording.work = lambda: result.copy_(2 * x.detach())
        return result

    recorded, x = Recorded(double), torch.ones(2)
    first = recorded(x)
    x += 1
    assert first.tolist() == [2, 2]
    assert recorded(x).tolist() == [4, 4]
    assert recorded(torch.full((2,), 5.0)).tolist() == [10, 10]
    assert first.tolist() == [2, 2]
    assert calls == 5 * [(2,)]  # to warm up, under watch, and to record
    assert recorded(torch.ones(1)).tolist() == [2]
    assert calls[5:] == 5 * [(1,)]
    assert gpu.mode == 0
    assert recorded.refused is None


def test_what_waits_is_not_recorded_and_the_watch_ends(gpu: FakeGPU) -> None:
    def waits(x: Tensor) -> Tensor:
        if gpu.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        assert gpu.recording is None
        return 2 * x

    recorded = Recorded(waits)
    assert recorded(torch.ones(2)).tolist() == [2, 2]
    assert gpu.mode == 0
    assert recorded.refused == "RuntimeError: called a synchronizing CUDA operation"


def test_the_report_says_what_was_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.build(batch=1, width=4)
    attack, state = workload.attack(compilation="auto")
    attack.advance(state)
    assert "recorded" not in " ".join(attack.result(state)[0].notes)
    monkeypatch.setattr(Matching, "refused", {"it waits"})
    monkeypatch.setattr(Pixels, "refused", {"it waits", "other"})
    notes = attack.result(state)[0].notes
    assert notes[-2:] == tuple(
        f"slower than it might be: kernels were not recorded ({x})" for x in ("it waits", "other")
    )


def test_inputs_of_ever_new_shapes_are_not_recorded_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Fake:
        def __init__(self, *_: object) -> None:
            made.append(self)

        def replay(self, tensors: list[Tensor]) -> Tensor:
            return 2 * tensors[0]

    monkeypatch.setattr(recording, "_Graph", Fake)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    recorded = Recorded(lambda x: 2 * x)
    for size in (*range(1, 12), *range(1, 12)):
        assert recorded(torch.ones(size)).tolist() == [2] * size
        assert recorded(torch.ones(size)).tolist() == [2] * size
    assert len(made) == 8
    assert recorded.refused == "inputs of more than 8 shapes"
