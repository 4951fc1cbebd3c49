"""`train.py`: backbones, generators, shadow models, and zoos of checkpoints."""
