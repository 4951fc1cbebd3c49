"""Attacks on training sets keep their tensors on the device of the weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_recon.attacks.trainset.inactive import LayerChange, _Search
from tests.attacks.trainset.test_inactive import noise, victim


def test_what_is_drawn_goes_to_the_device_of_the_weights() -> None:
    start, change = noise(victim(), 10), LayerChange.of(victim())
    tensors = {name: value.to("meta") for name, value in vars(change).items() if isinstance(value, Tensor)}
    seen = replace(start.seen, mean=start.seen.mean.to("meta"))  # no GPU is needed to ask for another device
    there, here = _Search(replace(start, seen=seen), replace(change, **tensors)), _Search(start, change)
    for step in (0, len(start.images)):  # from a candidate, and from a random image
        chosen = there.chosen(step)
        assert chosen.device == there.normals.device == torch.device("meta")
        assert chosen.shape == here.chosen(step).shape
    there.load_state_dict(here.state_dict())
    assert there.normals.device == torch.device("meta")
    assert torch.equal(there.state_dict()["generator"], here.state_dict()["generator"])
