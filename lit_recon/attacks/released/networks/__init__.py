"""Reconstructors that are neural networks (RecoNN), trained on shadow models."""
