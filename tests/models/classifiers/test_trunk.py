"""What the base class of trunks keeps and refuses."""

from __future__ import annotations

import pytest
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.models import Trunk


class Flat(Trunk):
    def __init__(self, image_shape: tuple[int, int, int], scale: int = 1) -> None:
        super().__init__(image_shape, {"scale": scale})

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def test_it_keeps_the_arguments_that_rebuild_it() -> None:
    trunk = Flat((1, 4, 6), scale=3)
    assert trunk.image_shape == (1, 4, 6)
    assert trunk.arguments == {"image_shape": [1, 4, 6], "scale": 3}


def test_the_shape_may_come_as_a_list_from_json() -> None:
    assert Flat([1, 4, 6]).image_shape == (1, 4, 6)  # type: ignore[arg-type]  # what JSON gives


@pytest.mark.parametrize("shape", [(3, 32), (1, 3, 32, 32), (3, 0, 32), ()])
def test_a_shape_that_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="channels, height, width"):
        Flat(shape)  # type: ignore[arg-type]  # wrong on purpose


def test_the_base_class_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Trunk((1, 4, 4), {})  # type: ignore[abstract]  # wrong on purpose
