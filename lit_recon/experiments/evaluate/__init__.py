"""`attack.py evaluate`: defenses judged by the strongest attack at equal utility."""
