"""Input features of a wide random layer, from the gradients of that layer and of the head after it."""
