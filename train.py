"""Train what is to be attacked: `python train.py backbone --config configs/train/resnet18_cifar10.yaml`."""

from __future__ import annotations

from lit_recon.cli import train

if __name__ == "__main__":
    raise SystemExit(train())
