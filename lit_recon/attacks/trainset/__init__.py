"""Attacks on a released model by someone who knows none of its training images."""
