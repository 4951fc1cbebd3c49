"""Pieces of work in resumable folders."""
