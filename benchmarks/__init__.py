"""Measure the library on a machine, and what its users would run otherwise.

Each module of this folder is a command, `python -m benchmarks.NAME`; `--help` lists its options. Among them:

    ops       the four fused ops, against cuBLAS + NCCL and torch's own overlapped ops
    ccl       the collectives of a context
    llm       whole models, tokens per second
    litmus    whether ranks see each other's accesses in the order that is promised
    again     all that the tables of the docs show, anew, within a budget of seconds
    report    the tables and plots of README and docs from the results, with marks of their age

What is no command stands in a package, and each package imports only those above it:

    measuring   rows as data, kernels compiled ahead, what a run writes down of itself and of the code that it ran
    rivals      who is measured in a fused op: ours, the rivals, the product alone, which gives the floor
    cases       what one benchmark measures: its contenders on one rank, its kernels, its models
    tables      results as Markdown, and which table stands on which page
    plots       results as pictures

A new row is a line in measuring/shapes.py, a new rival a module in rivals/ and its name in rivals/everyone.py. Ranks,
inputs, the check and the timer are those of `iris-tp bench`, in `iris_tp/bench`.
"""
