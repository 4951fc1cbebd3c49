"""`reconn.py membership`: infer which of two candidates was trained on."""
