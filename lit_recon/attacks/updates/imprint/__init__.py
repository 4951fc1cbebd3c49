"""Robbing the Fed: images read off the gradient of a layer that a malicious server inserted."""
