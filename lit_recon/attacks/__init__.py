"""Attacks: on federated updates, on released models, on linear models, and membership inference."""
