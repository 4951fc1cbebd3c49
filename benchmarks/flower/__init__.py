"""Updates that a real Flower federation sends, recorded for audits."""
