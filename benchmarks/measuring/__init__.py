"""The base of every benchmark: rows and models, ahead-of-time compilation, and the record of a run."""
