"""Robbing the Fed: images decoded from the gradient of a layer inserted by a malicious server."""
