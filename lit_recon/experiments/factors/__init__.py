"""`reconn.py run` with `factors`: vary one factor of the attack at a time."""
