"""`attack.py evaluate`: defenses compared by the strongest attack at equal utility."""
