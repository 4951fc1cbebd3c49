"""The classifiers under attack: networks, the wide feature layer, and what a malicious server makes of them."""
