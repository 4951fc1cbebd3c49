"""Attacks on the gradient of a fully connected first layer."""
