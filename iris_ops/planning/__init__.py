"""Plan which way computes a problem, and predict its time. Numbers only: nothing here imports Triton or a kernel."""
