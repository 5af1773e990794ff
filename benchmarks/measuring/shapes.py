"""The rows that are measured, as data; `iris_tp/bench/rows.py` defines a row."""

from collections.abc import Callable, Iterable

from iris_tp.bench.rows import CALLS, Row

from benchmarks.measuring import models


def _rows(ops: str, *sizes: tuple[int, int, int], form: str = "rows") -> list[Row]:
    return [Row(op, *size, form) for op in ops.split() for size in sizes]


# The first sizes that were measured, the set `facts`: those of 4 ranks, on any number.

SQUARE = (8192, 8192, 7168)
REDUCED = (
    SQUARE,
    (8192, 8192, 2048),
    (2048, 8192, 7168),
    (2048, 8192, 2048),
    (512, 8192, 7168),
    (512, 8192, 2048),
    (4096, 4096, 3584),
    (128, 4096, 3584),
)
FEW_ROWS = (
    (64, 8192, 7168),
    (64, 8192, 2048),
    (1, 8192, 7168),
    (1, 8192, 2048),
    (256, 8192, 2048),
    (128, 8192, 2048),
    (32, 8192, 2048),
    (16, 8192, 7168),
    (16, 8192, 2048),
    (16, 4096, 3584),
    (4, 7168, 4096),
    (4, 5120, 2048),
    (1, 4096, 3584),
    (1, 4096, 1024),
)
GATHERED = (
    SQUARE,
    (8192, 14336, 8192),
    (8192, 2560, 8192),
    (2048, 14336, 8192),
    (2048, 2560, 8192),
    (512, 14336, 8192),
    (512, 2560, 8192),
)

# The models' layers, whose sizes depend on the number of ranks.

PREFILL_M = (512, 1024, 2048, 4096, 8192, 16384)
RAGGED_M = (1000, 3001, 5120)
DECODE_M = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BETWEEN_M = (24, 40, 72, 100, 144, 200, 320, 448, 700, 1100, 1500)


def _prefill_layers(world: int) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return (N, K) of every layer, by op and form. Gathered outputs are q, k and v, with their full N."""
    reduced = _once(shape for model in models.PREFILL for shape in model.row_linears(world))
    gathered = _once(shape for model in models.PREFILL for shape in model.column_linears(world))
    outputs = _once((model.qkv, model.hidden) for model in models.PREFILL if model.kv)
    return {("ar", "rows"): reduced, ("rs", "rows"): reduced, ("ag", "rows"): gathered, ("ga", "cols"): outputs}


def _ragged(world: int) -> list[Row]:
    """Return rows that tiles and ranks do not divide, on one layer an op."""
    model = models.LLAMA_70B
    down, gate_up = model.row_linears(world)[1], model.column_linears(world)[1]
    layers = {("ar", "rows"): down, ("rs", "rows"): down, ("ag", "rows"): gate_up, ("ga", "cols"): (model.qkv, 8192)}
    return [Row(op, M, *layer, form) for (op, form), layer in layers.items() for M in RAGGED_M]


def _lm_heads(rows: Iterable[int], served: Iterable[models.Model]) -> list[Row]:
    return [Row("ga", M, model.vocab, model.hidden, "cols") for model in served if model.vocab for M in rows]


def prefill(world: int) -> list[Row]:
    layers = _prefill_layers(world).items()
    rows = [Row(op, M, *layer, form) for (op, form), shapes in layers for layer in shapes for M in PREFILL_M]
    return _once([*rows, *_ragged(world), *_lm_heads(PREFILL_M[:2], models.PREFILL)])


def prefill_sample(world: int) -> list[Row]:
    """Return each layer once an op, M taking turns; then one of each op that is ragged."""
    rows = [
        Row(op, PREFILL_M[(turn + start) % len(PREFILL_M)], *layer, form)
        for start, ((op, form), shapes) in enumerate(_prefill_layers(world).items())
        for turn, layer in enumerate(shapes)
    ]
    ragged = [row for i, row in enumerate(_ragged(world)) if i in (1, 3, 8, 10)]
    return _once([*rows, *ragged, *_lm_heads((512,), [models.LLAMA_8B])])


def _decode_layers(world: int) -> list[tuple[int, int]]:
    return _once(shape for model in models.DECODE for shape in model.row_linears(world))


def _rarer_decode(world: int, rows: Iterable[int]) -> list[Row]:
    """Return the ops that are rarer at few rows: by rows, where parts are short or empty, and by columns."""
    model = models.LLAMA_70B
    layers = (
        [("rs", "rows", layer) for layer in model.row_linears(world)]
        + [("ag", "rows", layer) for layer in model.column_linears(world)]
        + [("rs", "cols", model.row_linears(world)[0]), ("ag", "k", model.column_linears(world)[0])]
    )
    return [Row(op, M, *layer, form) for op, form, layer in layers for M in rows]


def decode(world: int) -> list[Row]:
    reduced = [Row("ar", M, *layer) for layer in _decode_layers(world) for M in DECODE_M]
    heads = _lm_heads(DECODE_M, [models.LLAMA_8B, models.LLAMA_70B])
    return _once([*reduced, *_rarer_decode(world, DECODE_M), *heads])


def decode_sample(world: int) -> list[Row]:
    """Return one layer at every M, for the picture; the others once, M taking turns; then some of each other op."""
    sweep = [Row("ar", M, *models.LLAMA_70B.row_linears(world)[0]) for M in DECODE_M]
    other_layers = [Row("ar", DECODE_M[4 * i % 9], *layer) for i, layer in enumerate(_decode_layers(world))]
    rest = _rarer_decode(world, (1, 32))
    return _once([*sweep, *other_layers, *rest, *_lm_heads((1, 16, 64, 256), [models.LLAMA_70B])])


def between(world: int) -> list[Row]:
    """Return batches and prompts as they come: rows that are no powers of two, layers taking turns."""
    reduced, layers = _decode_layers(world), _prefill_layers(world)
    rows = [Row("ar", M, *reduced[(2 * turn + i) % len(reduced)]) for turn, M in enumerate(BETWEEN_M) for i in range(2)]
    for start, op in enumerate(("rs", "ag", "ga")):
        ((form, shapes),) = ((form, shapes) for (name, form), shapes in layers.items() if name == op)
        some = BETWEEN_M[start % 2 + 2 :: 2]
        rows += [Row(op, M, *shapes[turn % len(shapes)], form) for turn, M in enumerate(some)]
    return _once(rows)


def fp16_sample(world: int) -> list[Row]:
    """Return one row of prompts and one of decoding an op, to be measured with `--dtype float16`."""
    model = models.LLAMA_70B
    (o, down), (qkv, gate_up) = model.row_linears(world), model.column_linears(world)
    return [
        *(Row("ar", 2048, *down), Row("ar", 16, *o)),
        *(Row("rs", 4096, *o), Row("rs", 32, *down)),
        *(Row("ag", 2048, *gate_up), Row("ag", 32, *qkv)),
        *(Row("ga", 512, model.qkv, model.hidden, "cols"), *_lm_heads([1], [model])),
    ]


def stress(world: int) -> list[Row]:
    """Return small rows, of every algorithm, even and uneven: what `benchmarks.stress` shuffles."""
    reduced = ((1, 4096, 1024), (5, 5120, 520), (16, 8192, 512), (64, 2048, 1024), (200, 1536, 256), (700, 2048, 512))
    parts = ((1, 1024, 512), (37, 1536, 256), (256, 2048, 1024), (1000, 1032, 520))
    return [
        *_rows("ar", *reduced, (1024, 2048, 1024), (1000, 4096, 2048), (2100, 8192, 512)),
        *_rows("rs ag ga", *parts),
        *_rows("rs ga", (3, 128 * world, 512), (130, 512 * world, 256), form="cols"),
        *_rows("ag", (3, 1024, 64 * world), (130, 512, 256 * world), form="k"),
        Row("ar", 128, 5120, 4096),  # torch's product and a collective
        Row("rs", 320, 8192, 4096),
    ]


def _once(items: Iterable) -> list:
    """Return the rows without repetitions: models share layers."""
    return list(dict.fromkeys(items))


SETS: dict[str, Callable[[int], list[Row]]] = {
    "facts": lambda world: _rows("ar", *REDUCED, *FEW_ROWS) + _rows("rs", *REDUCED) + _rows("ag ga", *GATHERED),
    "prefill": prefill,
    "prefill-sample": prefill_sample,
    "decode": decode,
    "decode-sample": decode_sample,
    "between": between,
    "fp16-sample": fp16_sample,
    "stress": stress,
    "quick": lambda world: _rows("ar rs ag ga", SQUARE, (512, 8192, 2048)),
    "tiny": lambda world: _rows("ar rs ag ga", (16, 48, 32), (32, 32, 64)),  # for machines without a GPU
    "tiny-forms": lambda world: [  # the same, by columns, and with uneven parts
        *_rows("rs ga", (5, 16 * world, 32), form="cols"),
        *_rows("ag", (5, 32, 16 * world), form="k"),
        *_rows("rs ag ga", (5, 32, 16)),
        Row("rs", 25, 32, 16),  # whose parts take different numbers of whole 256 bytes of a heap
    ],
    "given": lambda world: [],  # the sizes of --rows and no others
}


def select(names: str, ops: list[str], world: int, sizes: list[tuple[int, int, int]] | None = None) -> list[Row]:
    """Return the rows of some sets, as "facts,decode", that belong to `ops`.

    `sizes`, each M, N and K, keeps those only; of the set "given" they are the rows.
    """
    unknown = [name for name in names.split(",") if name not in SETS]
    if unknown:
        raise ValueError(f"no set of rows is called {unknown[0]!r}; there are {', '.join(SETS)}")
    rows = _once(row for name in names.split(",") for row in SETS[name](world))
    if sizes and names == "given":
        rows = [Row(op, *size) for op in CALLS for size in sizes]
    rows = [row for row in rows if row.op in ops and (not sizes or (row.M, row.N, row.K) in sizes)]
    if not rows:
        raise ValueError(f"no row of {names!r} has ops {ops} and sizes {sizes}; see benchmarks/measuring/shapes.py")
    return rows
