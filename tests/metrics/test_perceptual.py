from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_recon.errors import CorruptFileError, MissingDataError, ShapeError
from lit_recon.metrics import perceptual
from lit_recon.metrics import perceptual as backbone_weights
from lit_recon.metrics.perceptual import Lpips, Unavailable, cached_weights, load_lpips


@pytest.fixture(scope="module")
def score(squeezenet: dict[str, Tensor]) -> Lpips:
    return Lpips("squeeze", squeezenet)


def images(n: int, c: int, h: int, w: int, seed: int = 0) -> Tensor:
    return torch.rand(n, c, h, w, generator=torch.Generator().manual_seed(seed))


# The package itself loads its backbone by an argument that torchvision has deprecated.
@pytest.mark.filterwarnings("ignore:.*(pretrained|weight enum):UserWarning")
def test_figures_are_those_of_the_package(hub: Path, squeezenet: dict[str, Tensor]) -> None:
    import lpips

    torch.save(squeezenet, cached_weights("squeeze"))
    package = lpips.LPIPS(net="squeeze", verbose=False)  # reads torch.hub's cache through torchvision
    ours = load_lpips("squeeze", download=False)
    assert isinstance(ours, Lpips)
    a, b = images(3, 3, 32, 40), images(3, 3, 32, 40, seed=1)
    with torch.no_grad():
        expected = package(2 * a - 1, 2 * b - 1).flatten().double()
        small = [torch.nn.functional.interpolate(x[..., :16, :20], (64, 80), mode="bilinear") for x in (a, b)]
        upsampled = package(2 * small[0] - 1, 2 * small[1] - 1).flatten().double()
        grey = package(*(2 * x[:, :1].repeat(1, 3, 1, 1) - 1 for x in (a, b))).flatten().double()
    assert (expected > 0.01).all()
    torch.testing.assert_close(ours(a, b), expected)
    torch.testing.assert_close(ours(a[..., :16, :20], b[..., :16, :20]), upsampled)
    torch.testing.assert_close(ours(a[:, :1], b[:, :1]), grey)


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 1, 8, 8), (1, 3, 5, 33)])
def test_equal_images_are_at_distance_zero(score: Lpips, shape: tuple[int, int, int, int]) -> None:
    assert score(images(*shape), images(*shape)).tolist() == [0.0] * shape[0]


def test_a_large_batch_is_scored_in_chunks(score: Lpips, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = images(5, 3, 32, 32), images(5, 3, 32, 32, seed=1)
    together = score(a, b)
    monkeypatch.setattr(perceptual, "_CHUNK", 2)
    torch.testing.assert_close(score(a, b), together)


def test_an_empty_batch_has_no_figures(score: Lpips) -> None:
    assert score(torch.zeros(0, 3, 8, 8), torch.zeros(0, 3, 8, 8)).shape == (0,)


def test_two_channels_are_neither_grey_nor_color(score: Lpips) -> None:
    with pytest.raises(ShapeError, match="c = 1 or 3; got c = 2"):
        score(images(1, 2, 32, 32), images(1, 2, 32, 32))


def test_the_repr_names_the_backbone(score: Lpips) -> None:
    assert repr(score) == "Lpips(network='squeeze')"


def test_building_the_network_leaves_the_seeds_alone(squeezenet: dict[str, Tensor]) -> None:
    before = torch.get_rng_state()
    Lpips("squeeze", squeezenet)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_given_file_is_used(tmp_path: Path, squeezenet: dict[str, Tensor], score: Lpips, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(squeezenet, path)
    else:
        torch.save(squeezenet, path)
    loaded = load_lpips("squeeze", weights=path)
    assert isinstance(loaded, Lpips)
    a, b = images(2, 3, 32, 32), images(2, 3, 32, 32, seed=1)
    assert torch.equal(loaded(a, b), score(a, b))


def test_a_given_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"absent\.pth"):
        load_lpips("squeeze", weights=tmp_path / "absent.pth")


def test_weights_of_another_backbone_are_an_error(tmp_path: Path, squeezenet: dict[str, Tensor]) -> None:
    torch.save(squeezenet, tmp_path / "squeeze.pth")
    with pytest.raises(CorruptFileError, match="not a torchvision 'alex' backbone"):
        load_lpips("alex", weights=tmp_path / "squeeze.pth")


def test_weights_of_other_shapes_are_an_error(squeezenet: dict[str, Tensor]) -> None:
    with pytest.raises(CorruptFileError, match="shapes are not those of 'squeeze'"):
        Lpips("squeeze", {**squeezenet, "features.0.weight": torch.zeros(1, 3, 3, 3)})


def test_without_cache_and_download_the_reason_says_where_to_put_the_file(hub: Path) -> None:
    answer = load_lpips("vgg", download=False)
    assert isinstance(answer, Unavailable)
    assert str(hub / "vgg16-397923af.pth") in answer.reason


def test_without_network_there_is_a_reason_and_no_error(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone_weights, "_SERVER", "http://127.0.0.1:9/")
    answer = load_lpips("squeeze")
    assert isinstance(answer, Unavailable)
    assert "could not be downloaded" in answer.reason


def test_a_damaged_cache_is_a_reason_and_no_error(hub: Path) -> None:
    cached_weights("squeeze").write_bytes(b"half a fi")
    answer = load_lpips("squeeze", download=False)
    assert isinstance(answer, Unavailable)
    assert "delete the cached file" in answer.reason


def test_a_download_is_used(hub: Path, squeezenet: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(network: backbone_weights.LpipsNetwork) -> Path:
        torch.save(squeezenet, cached_weights(network))
        return cached_weights(network)

    monkeypatch.setattr(perceptual, "download_weights", deliver)
    assert isinstance(load_lpips("squeeze"), Lpips)
