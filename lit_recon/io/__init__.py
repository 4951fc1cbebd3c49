"""Atomic writing of files, and safetensors files with a header."""
