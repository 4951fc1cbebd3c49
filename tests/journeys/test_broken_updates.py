"""What users send when something is wrong: each ends in one sentence that names the trouble."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.experiments.audit.updates import convnet, images, labels

State = dict[str, Tensor]
N = 4


def network() -> nn.Module:
    """The client's model: its running statistics are those of many normalized images."""
    model = convnet(norm=True).train()
    with torch.no_grad():
        for seed in range(40):
            model((images(64, seed % 4) - 0.5) / 0.25)
    return model


def trained(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    steps: int = 1,
    rule: str = "SGD",
    n: int = N,
    **how: Any,
) -> State:
    """The weights after the client's training."""
    after = copy.deepcopy(model)
    optimizer = getattr(torch.optim, rule)(after.parameters(), **{"lr": 0.1, **how})
    for _ in range(steps):
        optimizer.zero_grad()
        loss(after((images(n) - 0.5) / 0.25), labels(n)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in after.state_dict().items()}


@dataclass(frozen=True)
class Files:
    """Where the parts of an update are kept."""

    before: Path
    sent: Path

    def write(self, before: State, sent: State) -> None:
        torch.save(before, self.before)
        save_file({name: value.contiguous() for name, value in sent.items()}, self.sent)


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def of_sent(change: Callable[[State], State]) -> Callable[[Files], None]:
    """Files whose update is changed."""
    return lambda files: files.write(network().state_dict(), change(trained(network())))


def training(**how: Any) -> Callable[[Files], None]:
    """Files of a client that trains in another way than it says."""
    return lambda files: files.write(network().state_dict(), trained(network(), **how))


def difference(sign: float = 1.0) -> Callable[[State], State]:
    start = network().state_dict()
    return lambda sent: {name: sign * (start[name] - value) for name, value in sent.items() if "batches" not in name}


def with_value(value: float) -> Callable[[State], State]:
    def change(sent: State) -> State:
        sent["0.weight"][0, 0, 0, 0] = value
        return sent

    return change


def squared(logits: Tensor, classes: Tensor) -> Tensor:
    return (logits - nn.functional.one_hot(classes, 10)).square().mean()


def no_training(files: Files) -> None:
    files.write(network().state_dict(), network().state_dict())


def pickled(files: Files) -> None:
    no_training(files)
    torch.save({"0.weight": Payload()}, files.before)


def cut_off(files: Files) -> None:
    training()(files)
    files.sent.write_bytes(files.sent.read_bytes()[:2000])


def without_buffers(files: Files) -> None:
    before = {name: value for name, value in network().state_dict().items() if "running" not in name}
    files.write(before, trained(network()))


def without_a_layer(files: Files) -> None:
    before = {name: value for name, value in network().state_dict().items() if not name.startswith("6.")}
    files.write(before, trained(network()))


def renamed(sent: State) -> State:
    return {f"layer{name.replace('.', '_')}": value for name, value in sent.items()}


def transposed(sent: State) -> State:
    return {**sent, "4.weight": sent["4.weight"].T}


def rounded(sent: State) -> State:
    return {name: value.half() for name, value in sent.items()}


def integers(sent: State) -> State:
    return {name: (127 * value).round().to(torch.int8) for name, value in sent.items()}


def noisy(sent: State) -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        name: value + 1e-3 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in sent.items()
    }


def pruned(sent: State) -> State:
    start, changed = network().state_dict(), dict(sent)
    for name in ("0.weight", "4.weight", "6.weight"):
        moved = sent[name] - start[name]
        changed[name] = start[name] + torch.where(moved.abs() >= moved.abs().quantile(0.6), moved, 0.0)
    return changed


#: What is wrong, how it is made, what the command is told besides, whether it is refused, and what it says.
BROKEN: list[tuple[str, Callable[[Files], None], list[str], bool, str]] = [
    ("axes of another framework", of_sent(transposed), [], True, "its axes are in another order"),
    ("other names", of_sent(renamed), [], True, "which the model does not have"),
    ("half precision", of_sent(rounded), [], False, "rounded to float16"),
    ("integers", of_sent(integers), [], True, "is of type torch.int8: give real numbers"),
    ("not a number", of_sent(with_value(float("nan"))), [], True, "NaN or infinite values in 0.weight"),
    ("infinity", of_sent(with_value(float("inf"))), [], True, "NaN or infinite values in 0.weight"),
    ("no training", no_training, [], True, "the client has not trained"),
    ("nothing", of_sent(lambda sent: {n: torch.zeros_like(v) for n, v in sent.items()}), [], True, "sent is zero"),
    ("buffers are missing", without_buffers, [], False, "The weights before lack 1.running_mean, 1.running_var"),
    ("a layer is missing", without_a_layer, [], True, "the weights before lack 6.weight, 6.bias"),
    ("after minus before", of_sent(difference(-1.0)), [], False, "The sign is reversed"),
    ("a difference as weights", of_sent(difference()), ["--form", "weights"], False, "is said to be new weights"),
    (
        "another normalization",
        training(),
        ["--model.normalization", "{mean: [0.0], std: [1.0]}"],
        False,
        "images in [0, 1] hardly have",
    ),
    ("another loss", training(loss=squared), [], False, "another loss"),
    ("another rate", training(lr=1.0), [], False, "times as large as a mean gradient would be, and lr would be"),
    ("weight decay", training(weight_decay=0.1), [], False, "The update holds weight decay of 0.1"),
    ("a sum instead of a mean", training(lr=0.1 * N), [], False, "a sum over the images instead of their mean"),
    ("Adam", training(rule="Adam", lr=0.001), [], False, "the client used Adam"),
    ("more images", training(n=9), [], False, "has rank 9, but 4 images can give rank 4 at most"),
    ("more steps", training(steps=3, lr=0.01), [], False, "1 steps are claimed, but BatchNorm counted 3 batches"),
    ("noise", of_sent(noisy), [], False, "noise of about"),
    ("pruning", of_sent(pruned), [], False, "are zero in scattered places: the update was pruned"),
    ("code in a file", pickled, [], True, "holds more than tensors"),
    ("half a file", cut_off, [], True, "is truncated"),
    ("number of images", training(), ["--batch_size", "0"], True, "batch_size must be at least 1 image"),
    (
        "size of images",
        training(),
        ["--model.image_shape", "[1, 9, 9]"],
        True,
        "give a module that takes images, and the image_shape that it was built for",
    ),
]


@pytest.mark.parametrize(
    ("make", "told", "refused", "said"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN]
)
def test_the_trouble_is_named(
    make: Callable[[Files], None],
    told: list[str],
    refused: bool,
    said: str,
    attack: Callable[..., Any],
    tmp_path: Path,
) -> None:
    files = Files(tmp_path / "before.pt", tmp_path / "sent.safetensors")
    make(files)
    ended = attack(
        *("audit", "--model.class_path", "tests.journeys.test_broken_updates.network"),
        *("--model.image_shape", "[1, 8, 8]", "--model.normalization", "{mean: [0.5], std: [0.25]}"),
        *("--before", files.before, "--sent", files.sent, "--batch_size", N, "--lr", 0.1),
        *("--attacks", "[analytic]", "--minutes", 1, "--protection_minutes", 0, "--wandb.mode", "disabled"),
        *(*told, "--out", tmp_path / "run"),
    )
    assert "Traceback" not in ended.err
    if refused:
        assert ended.code == 2
        [line] = ended.err.strip().splitlines()
        assert said in line
        assert not (tmp_path / "run").exists()
        return
    assert ended.code == 0, ended.err
    [line] = [line for line in ended.out.splitlines() if said in line]
    assert line.startswith(("doubt ", "found "))
    assert said in (tmp_path / "run" / "report.html").read_text().replace("&#39;", "'")
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["doubts"] or line.startswith("found ")
