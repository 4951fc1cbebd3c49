"""`reconn.py rero`: bounds on reconstruction under differential privacy, with attacks beside them."""
