"""Ways to train many shadow models at once."""
