"""Generators of images and the U-Net of the deep image prior."""
