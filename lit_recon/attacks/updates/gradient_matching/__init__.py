"""Gradient matching: an objective, priors, a parametrization, a solver and label recovery."""
