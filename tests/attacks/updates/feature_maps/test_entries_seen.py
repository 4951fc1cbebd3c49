"""Images of which layers see fewer entries than they have pixels: their patches do not determine them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import MapMatching, PatchMatching
from lit_recon.attacks.updates.feature_maps.convolutions import called_until, unseen_pixels
from lit_recon.attacks.updates.feature_maps.input_map import entries_seen
from lit_recon.clients import Client
from lit_recon.models import Backbone
from lit_recon.records import Knowledge, Normalization, Observation
from tests.attacks.updates.feature_maps.networks import Shallow


def behind_few_entries(images: Tensor, least: float) -> Observation:
    """The update of a network whose second convolution, the matched one, sees entries above `least` only."""
    torch.manual_seed(0)
    model = Backbone(Shallow(16, 320), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    model.trunk.layers[2] = nn.Threshold(least, 0.0)
    return Client(model, "eval").observe(images, torch.zeros(len(images)).long(), Knowledge())


@pytest.mark.parametrize(("least", "certain"), [(0.0, True), (1.0, False)])
def test_images_are_not_certified_of_which_fewer_entries_are_seen_than_they_have_pixels(
    least: float, certain: bool
) -> None:
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    penalty = PatchMatching().prepare(behind_few_entries(images, least))
    certified, final, notes = penalty.certificate(images, torch.zeros(1).long())  # the true image
    assert certified is not None
    assert certified.tolist() == [certain]
    assert final  # no other start would tell
    what = r"image 1: not certified: .* sees only (\d+) entries other than zero of it, fewer than its 768 pixels"
    few = [re.search(what, note) for note in notes]
    assert [0 < int(one[1]) < 768 for one in few if one] == [True] * (not certain)


def in_steps(kernel: int, padding: int, stem: bool = False) -> Observation:
    """The update of a network that begins with a convolution in steps of 2, beside a `stem` that sees all pixels."""
    torch.manual_seed(0)
    first: nn.Module = nn.Conv2d(3, 64, kernel, stride=2, padding=padding)
    if stem:
        first = Sum(first, nn.Conv2d(3, 64, 4, stride=2, padding=1))
    side = (16 + 2 * padding - kernel) // 2 + 1
    second = nn.Conv2d(64, 256, 3, padding=1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(256 * side**2, 5)).eval()
    client = Client(model, image_shape=(3, 16, 16), normalization=Normalization((0.5,) * 3, (0.25,) * 3))
    return client.observe(image(), torch.zeros(1).long())


class Sum(nn.Module):
    """The sum of what two layers make of their input."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.one(images) + self.other(images)
        return out


def image() -> Tensor:
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attack", [MapMatching, PatchMatching])
def test_images_are_not_certified_of_which_no_layer_sees_some_pixels(
    attack: type[MapMatching | PatchMatching],
) -> None:
    for padding, certain in ((1, True), (0, False)):
        penalty = attack().prepare(in_steps(3, padding))
        certified, final, notes = penalty.certificate(image(), torch.zeros(1).long())  # the true image
        assert certified is not None
        assert certified.tolist() == [certain], notes
        assert final  # no other start would tell
        # of the last row and the last column
        assert certain or "image 1: not certified: no layer sees 93 of its 768 pixels" in notes


def test_pixels_are_seen_by_all_layers_of_the_images_together() -> None:
    assert unseen_pixels(in_steps(1, 0)) == "no layer sees 576 of its 768 pixels"
    assert unseen_pixels(in_steps(2, 0)) == ""
    assert unseen_pixels(in_steps(1, 0, stem=True)) == ""


def test_too_few_entries_of_one_image_leave_the_certificate_of_another() -> None:
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[1] = 0.5 + 0.02 * (images[1] - 0.5)
    seen = behind_few_entries(images, 0.1)
    counts = entries_seen(seen, images, ["trunk.layers.3"])
    assert (counts >= 768).tolist() == [True, False]
    penalty = PatchMatching().prepare(seen)
    without = penalty._explanation(images, torch.zeros(2).long())[0]
    assert without is not None
    assert without[0]
    certified, _, _ = penalty.certificate(images, torch.zeros(2).long())
    assert certified is not None
    assert certified.tolist() == [True, False]


def test_entries_are_the_least_up_to_the_matched_layer() -> None:
    narrow, wide = nn.Conv2d(3, 2, 2, stride=2, bias=False), nn.Conv2d(2, 64, 1, bias=False)
    for layer in (narrow, wide):
        nn.init.constant_(layer.weight, 1.0)
    model = nn.Sequential(narrow, nn.ReLU(), wide, nn.ReLU(), nn.Conv2d(64, 8, 2), nn.Flatten(), nn.Linear(8, 5)).eval()
    images = torch.zeros(2, 3, 4, 4)
    images[0, :, :2], images[1] = 1.0, 1.0  # of the first image the upper half
    client = Client(model, image_shape=(3, 4, 4), normalization=Normalization((0.5,) * 3, (0.25,) * 3))
    seen = client.observe(images, torch.arange(2))
    names = [name for name, module in seen.model.named_modules() if isinstance(module, nn.Conv2d)]
    assert called_until(seen, names[2:]) == names
    assert called_until(seen, [names[2], names[1]]) == names[:2]
    assert called_until(seen, ["head"]) == []
    # that before the wide one has 128 and 256 entries
    assert entries_seen(seen, images, names[2:]).tolist() == [4, 8]
    assert entries_seen(seen, images, names[:1]).tolist() == [48, 48]  # of the images themselves all
    assert entries_seen(seen, images, []).tolist() == [48, 48]
