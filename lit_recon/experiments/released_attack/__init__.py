"""`reconn.py run`: reconstruct the unknown training image of released models."""
