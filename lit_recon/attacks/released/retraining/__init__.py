"""Reconstruction by repeating the training until the weights agree."""
