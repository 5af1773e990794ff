"""How calls are measured: rows, inputs, the check, the timer; and `iris-tp bench`, which asks for one op.

`benchmarks/` of a checkout measures with it, too: there are the sizes of models, more rivals, tables and results.
"""
