"""`attack.py run`: attack clients' updates and score the reconstructions."""
