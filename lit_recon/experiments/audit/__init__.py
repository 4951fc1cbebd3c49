"""`attack.py audit`: what an update of a user's own system gives away, and which defense would have stopped it."""
