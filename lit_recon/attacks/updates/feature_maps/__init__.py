"""Exact feature maps of an inner layer from one convolution's gradient, and images from the maps."""
