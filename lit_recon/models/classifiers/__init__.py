"""Classifiers under attack: networks, the wide feature layer, and modifications by a malicious server."""
