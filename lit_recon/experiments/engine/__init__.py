"""The experiment engine: a study is a set of pieces, run in this process or on a Ray cluster."""
