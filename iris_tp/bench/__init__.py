"""Measure calls: rows, inputs, the check, the timer; and `iris-tp bench`, which measures one op.

`benchmarks/` of a checkout measures with it, too; it has the sizes of models, more rivals, tables and results.
"""
