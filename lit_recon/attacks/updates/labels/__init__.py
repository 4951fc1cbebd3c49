"""Label recovery from the gradient of a classifier's head."""
