"""`attack.py trainset`: attacks on the whole training set of a released model."""
