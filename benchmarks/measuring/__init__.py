"""What every benchmark starts from: rows and models, kernels compiled ahead, and what a run writes down of itself."""
