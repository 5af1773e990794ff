"""Weights in fewer bits than the rows that they are multiplied by: how they are stored, and their kernels."""
