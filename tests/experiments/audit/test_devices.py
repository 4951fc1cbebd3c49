"""What attacks of an audit see is on their device, and so are images that are compared with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lit_recon.experiments.audit import run, statistics
from lit_recon.experiments.audit.attacks import Outcome
from lit_recon.experiments.audit.interpretation import Interpretation
from lit_recon.experiments.audit.score import agreement
from lit_recon.models import public_model
from lit_recon.records import Batch, Reconstruction, Update
from tests.experiments.audit.updates import NORMALIZATION, SHAPE, convnet, images, labels, update

META = torch.device("meta")  # no GPU is needed to ask for another device


def test_statistics_of_the_batch_are_on_the_device_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convnet(norm=True)
    case = run._prepared(model, update(model, 4), SHAPE, NORMALIZATION, cross_entropy, None, None)

    def observed(found: Interpretation, *_: object) -> None:
        assert found.statistics is not None
        parts = [part for layer in found.statistics.values() for part in layer]
        assert {value.device for value in (*parts, *found.update.values())} == {META}
        raise KeyboardInterrupt  # nothing can be computed there

    monkeypatch.setattr(Interpretation, "observation", observed)
    with pytest.raises(KeyboardInterrupt):
        run._audited(case, cross_entropy, None, (), 1.0, 0.0, None, META, lambda line: None)


def test_images_of_an_attack_that_was_kept_go_to_the_device_of_the_update() -> None:
    given: list[Batch] = []

    def operator(_: object, batch: Batch) -> Update:
        given.append(batch)
        return {}

    seen: Any = SimpleNamespace(
        operator=operator, weights=None, update={}, like=torch.empty(0, device=META), defense=None
    )
    kept = Outcome("analytic", "", "", Reconstruction(images(1), labels(1), 0.0), distance=0.0)
    agreement(seen, kept)
    assert {part.device for part in given[0][:2]} == {META}


class Elsewhere(nn.Sequential):
    """A network that counts as on another device until it is moved."""

    moved = False

    def cpu(self) -> Elsewhere:
        self.moved = True
        return super().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_on_another_device_is_prepared_on_the_cpu(dtype: torch.dtype) -> None:
    model = Elsewhere(*convnet(norm=True).children()).to(dtype)
    recorded = update(convnet(norm=True), 4)
    case = run._prepared(model, recorded, SHAPE, NORMALIZATION, cross_entropy, None, None)
    assert case.public.model.moved
    assert not model.moved
    assert {value.dtype for value in case.public.model.parameters()} == {dtype}


def test_layers_are_called_on_the_device_of_the_model() -> None:
    public = public_model(convnet(norm=True).to(META), SHAPE)
    assert [call.given.device for call in statistics._calls(public, (nn.Conv2d,))] == [META]
