from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_recon.attacks.shadow import load_released
from lit_recon.attacks.shadow.training import flat_weights
from lit_recon.errors import (
    CorruptFileError,
    LitReconError,
    MissingDataError,
    ShapeError,
    UnsupportedModelError,
)
from lit_recon.models.released import ReleasedMLP

NETWORK = ReleasedMLP((1, 2, 2), 3, [5])


def state(n: int | None = 2) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() if n is None else torch.stack([parameter.detach() + i for i in range(n)])
        for name, parameter in NETWORK.named_parameters()
    }


def test_weights_come_in_the_order_of_the_network(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "two.safetensors")
    found = load_released(tmp_path / "two.safetensors", NETWORK, 2)
    torch.testing.assert_close(found, torch.stack([flat_weights(NETWORK), flat_weights(NETWORK) + 1]))
    save_file(state(None), tmp_path / "one.safetensors")
    assert torch.equal(load_released(tmp_path / "one.safetensors", NETWORK, 1)[0], flat_weights(NETWORK))


def test_several_models_of_one_training_follow_one_another(tmp_path: Path) -> None:
    early, late = flat_weights(NETWORK) - 1, flat_weights(NETWORK)
    both = {name: torch.stack([value - 1, value])[None] for name, value in state(None).items()}
    save_file(both, tmp_path / "both.safetensors")
    found = load_released(tmp_path / "both.safetensors", NETWORK, 1, 2)
    torch.testing.assert_close(found, torch.cat([early, late])[None])
    with pytest.raises(UnsupportedModelError, match=r"\(n, 3, 5, 4\) for this architecture and descent.snapshots; got"):
        load_released(tmp_path / "both.safetensors", NETWORK, 1, 3)


@pytest.mark.parametrize(
    ("change", "n", "error", "complaint"),
    [
        (
            {"layers.1.weight": torch.zeros(2, 6, 4)},
            2,
            UnsupportedModelError,
            r"\(n, 5, 4\) .* got \(2, 6, 4\)",
        ),
        ({"layers.4.weight": torch.zeros(2, 1)}, 2, UnsupportedModelError, "must hold the tensors .* of a ReleasedMLP"),
        ({}, 3, ShapeError, "one model per target, 3; layers.1.weight has 2"),
        ({"layers.3.bias": torch.full((2, 3), torch.nan)}, 2, ShapeError, "layers.3.bias holds NaN"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Tensor], n: int, error: type[LitReconError], complaint: str
) -> None:
    save_file({**state(), **change}, tmp_path / "models.safetensors")
    with pytest.raises(error, match=complaint):
        load_released(tmp_path / "models.safetensors", NETWORK, n)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="there is no safetensors file of released models at"):
        load_released(tmp_path / "none.safetensors", NETWORK, 1)
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CorruptFileError, match="truncated or not a safetensors file"):
        load_released(tmp_path / "broken.safetensors", NETWORK, 1)
