"""Adapters that record what a client of a federated framework receives and sends: `flower` and `nvflare`."""
