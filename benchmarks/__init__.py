"""What the library costs on a machine, beside what its users run otherwise.

    python -m benchmarks.ops                 the four fused ops against cuBLAS + NCCL and torch's own overlapped ops
    python -m benchmarks.table FILE...       the same tables from the JSON of an earlier run
    python -m benchmarks.norms               all-reduces that end in an RMSNorm, beside FlashInfer's
    python -m benchmarks.again               all that the tables of the docs show, anew, within a budget of seconds
    python -m benchmarks.report              the tables of README and docs from the results, with marks of their age
    python -m benchmarks.all_scatter         the ways of overlapping GEMM + all-scatter of examples/all_scatter
    python -m benchmarks.litmus              whether ranks see each other's accesses in the order that is promised
    python -m benchmarks.rma                 remote memory access by operation, size, programs and pair of ranks

    shapes.py    rows as data: an op and its M, N, K
    rivals.py    contenders as a list: us, the rivals, and the product alone, which gives the floor
    table.py     results as Markdown

Ranks, inputs, the check and the timer are those of `iris-tp bench`, in `iris_tp/bench`.

A new row is a line in shapes.py, a new rival an entry in rivals.py.
"""
