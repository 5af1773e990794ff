"""GEMM + all-scatter, overlapped in five ways; `docs/concepts/overlap.md` compares them.

Every rank holds all of A and a column block of B, and all want the whole product: each computes its columns of
`out = A @ [B_0, B_1, ...]` and scatters them to every rank.

    bulk_synchronous    the product, then the scatter: two kernels one after the other
    producer_consumer   the same two kernels at once on two streams; a flag a tile
    fused_sequential    one kernel; a program pushes each tile as it has it
    fused_specialized   one kernel; some programs multiply, some only move tiles
    fused_store_warp    one kernel; in each program some warps multiply, some only store and push (Gluon, Hopper)
"""
