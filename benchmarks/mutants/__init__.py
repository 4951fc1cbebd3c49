"""Mutation testing of the package."""
