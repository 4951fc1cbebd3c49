"""Files that appear whole or not at all, and tensors in safetensors files with a header."""
