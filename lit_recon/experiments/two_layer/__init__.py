"""`attack.py bounds`: attacks on two-layer networks against lower bounds on their error."""
