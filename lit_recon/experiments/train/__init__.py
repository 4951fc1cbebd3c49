"""`train.py`: backbones, generators and shadow models."""
