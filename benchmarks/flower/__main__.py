"""Record what the clients of a Flower federation send; needs lit_recon[flower].

    python -m benchmarks.flower OUT --root DIR

One file a case, `OUT/CASE.safetensors`, of the first client, with its images beside it for scores. Each is audited as a
user's own update would be:

    python -m benchmarks.command audit_flower_CASE attack.py audit --record OUT/CASE.safetensors ...
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import lit_recon._torchvision

import torch

from benchmarks.flower.app import CASES, Net, simulate, train
from benchmarks.workload import read_cifar10
from lit_recon.clients.record import RecordedUpdate


def main() -> None:
    """Run every case that has no file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", default="data")
    arguments, _, test = read_cifar10(parser)
    for name, case in CASES.items():
        path = arguments.out / f"{name}.safetensors"
        if path.exists():
            continue
        parts = torch.arange(2 * case.batch_size).chunk(2)
        data = {number: (test.pixels(part), test.labels[part]) for number, part in enumerate(parts)}
        expected = Net(case.norm)
        train(expected, case, *data[0])
        with tempfile.TemporaryDirectory() as folder:
            simulate(case, Path(folder), data)
            recorded = [RecordedUpdate.load(file) for file in sorted(Path(folder).iterdir())]
        # nodes have random names: the first client is the one that its images lead to
        errors = [distance(one, expected) for one in recorded]
        own = recorded[min(range(len(recorded)), key=lambda i: errors[i])]
        print(f"{name}: {len(recorded)} updates; the first client's differs by {min(errors):.1e} from a plain loop's")
        replace(own, truth={"images": data[0][0], "labels": data[0][1]}).save(path)


def distance(recorded: RecordedUpdate, expected: Net) -> float:
    """Largest difference between the weights that were sent and those of the same training without Flower."""
    own = dict(expected.named_parameters())
    return max(float((recorded.sent[name] - value.detach()).abs().max()) for name, value in own.items())


if __name__ == "__main__":
    main()
