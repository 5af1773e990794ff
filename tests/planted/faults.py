"""The faults: each is one wrong line of a kernel, of the planner, of the loader or of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, `new` stands where `old` should; `tests` should fail then.

    `missed`: why no test can see it without a GPU, of a fault for which that is so.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed: str = ""


OPS = ("tests/iris_ops/test_ops.py",)
EPOCHS = ("tests/iris_ops/test_epoch.py",)
FEW_ROWS = ("tests/iris_ops/test_lamport_matmul.py", *OPS, *EPOCHS)
ORDER = ("tests/iris_ops/test_order.py",)
PLAN = ("tests/iris_ops/test_plan.py", "tests/iris_ops/test_predictions.py", "tests/iris_ops/test_problem.py")
ARGUMENTS = ("tests/iris_ops/test_bad_input.py", *PLAN)
FP8 = ("tests/iris_ops/test_fp8.py",)
NORM = ("tests/iris_ops/test_rmsnorm_epilogue.py",)
GATED = ("tests/iris_ops/test_gated.py", "tests/layers/test_gated.py")
COLLECTIVES = ("tests/iris/test_ccl.py", "tests/iris/test_ccl_calls.py")
EXCHANGE = ("tests/iris/test_lamport.py", *FEW_ROWS)
LOST = ("tests/iris/test_lost_ranks.py", "tests/iris/test_failures.py", "tests/iris/test_ccl_calls.py")
HEAPS = ("tests/iris/test_different_heaps.py",)
RMA = ("tests/iris/test_rma.py", "tests/iris/test_atomics.py")
PTX = ("tests/test_codegen_ptx.py",)
SHARDS = ("tests/layers/test_shard.py", "tests/layers/test_linear.py")
LOADER = ("tests/layers/test_saving.py", "tests/layers/test_pretrained.py", "tests/layers/test_malformed.py")
ENGINE = ("tests/layers/test_engine.py", "tests/layers/test_generation.py")
ATTENTION = ("tests/layers/test_decode_attention.py", "tests/layers/test_prefill_attention.py")
MIXTURES = ("tests/iris_ops/test_moe.py", "tests/iris_ops/test_moe_calls.py")
STEPS = ("tests/layers/test_skinny_matmul.py",)
ON_HOPPER = "specialised warps run on Hopper only, and the number of stores in the PTX is the same"

DEVICE = [
    Fault(
        "a minimum takes the maximum",
        "iris/device/rma.py",
        "return tl.atomic_min(remote, val",
        "return tl.atomic_max(remote, val",
        RMA,
    ),
    Fault(
        "a copy lands on the caller",
        "iris/device/rma.py",
        "remote = translate(dst_ptr, cur_rank, to_rank, heap_bases)",
        "remote = translate(dst_ptr, cur_rank, cur_rank, heap_bases)",
        RMA,
    ),
    Fault(
        "atomics reach this GPU only",
        "iris/device/rma.py",
        'return "sys" if scope is None else scope',
        'return "gpu" if scope is None else scope',
        PTX,
    ),
    Fault(
        "a signal releases nothing",
        "iris/device/sync.py",
        'rma.atomic_xchg(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="release", scope="sys")',
        'rma.atomic_xchg(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="relaxed", scope="sys")',
        PTX,
    ),
    Fault(
        "signals to all peers have no barrier before them",
        "iris/device/sync.py",
        "    tl.debug_barrier()  # a release covers one thread; the barrier brings every thread's stores before it\n"
        "    tl.atomic_xchg(flags",
        "    tl.atomic_xchg(flags",
        PTX,
    ),
    Fault(
        "a wait does not acquire",
        "iris/device/sync.py",
        "    while waiting:\n"
        "        late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))\n"
        '        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")',
        "    while waiting:\n"
        "        late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))\n"
        '        seen = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")',
        PTX,
    ),
    Fault(
        "flags are compared without a wrap",
        "iris/device/sync.py",
        "return (seen - expected) >= 0",
        "return seen >= expected",
        EPOCHS,
    ),
    Fault(
        "an exact wait takes later epochs too",
        "iris/device/sync.py",
        "        return seen == expected\n",
        "        return (seen - expected) >= 0\n",
        EPOCHS,
    ),
    Fault(
        "an epoch may be 0",
        "iris/device/sync.py",
        "return epoch + 2 * (epoch == 0).to(tl.int32)",
        "return epoch",
        EPOCHS,
    ),
    Fault(
        "the count of tiles is not started again",
        "iris/device/sync.py",
        "        tl.store(sync + _NEXT_TILE, 0)\n",
        "",
        OPS,
    ),
    Fault(
        "a call that ends together does not wait for its peers",
        "iris/device/sync.py",
        "                _wait_all(ctx, completed, epoch, waiter, True, LANES)\n",
        "",
        (*EPOCHS, *OPS),
    ),
    Fault(
        "nobody waits until the peers have entered",
        "iris/device/sync.py",
        "ok = _wait_all(ctx, sync + _ENTERED, epoch, waiter, False, LANES)",
        "ok = True",
        (*EPOCHS, *OPS),
    ),
    Fault(
        "a collective does not advance its epoch",
        "iris/device/sync.py",
        '    if tl.atomic_add(sync + _FINISHED, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:\n'
        "        tl.store(sync + _FINISHED, 0)\n"
        "        tl.store(sync, epoch)\n",
        '    if tl.atomic_add(sync + _FINISHED, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:\n'
        "        tl.store(sync + _FINISHED, 0)\n",
        COLLECTIVES,
    ),
    Fault(
        "a barrier keeps one slot of digests",
        "iris/device/sync.py",
        "said = digests + (counts & 1) * WORLD_SIZE",
        "said = digests + (counts & 0) * WORLD_SIZE",
        (*HEAPS, "tests/iris/test_litmus.py"),
    ),
    Fault(
        "a difference at the last peer is overwritten",
        "iris/device/sync.py",
        "differing = tl.where(_told(places + peer * step) == place_of(ctx, out), differing, peer)",
        "differing = tl.where(_told(places + peer * step) == place_of(ctx, out), -1, peer)",
        HEAPS,
    ),
    Fault(
        "a wait does not look whether its peer lives",
        "iris/device/sync.py",
        "late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))",
        "late = is_late(end, polls)",
        (*EPOCHS, *LOST),
    ),
    Fault(
        "a record names the peer as its group counts it",
        "iris/device/waits.py",
        "tl.cast(-mark, tl.int64) + _LEFT_MARK, _name(ctx, peer))",
        "tl.cast(-mark, tl.int64) + _LEFT_MARK, tl.cast(peer, tl.int64))",
        LOST,
    ),
    Fault(
        "nobody has more patience with who waits itself",
        "iris/device/waits.py",
        "return arch.clock() + patience * tl.load(ctx.ctx_ptr + 4)",
        "return arch.clock() + tl.load(ctx.ctx_ptr + 4)",
        (*LOST, *EPOCHS),
    ),
    Fault(
        "seal keeps the sentinel",
        "iris/device/lamport.py",
        "return words ^ ((words == EMPTY).to(words.dtype) << (bits - 1))",
        "return words",
        EXCHANGE,
    ),
    Fault(
        "words that were taken stay",
        "iris/device/lamport.py",
        "tl.store(first + i * step, EMPTY, mask=_sent(ctx, mask, i, own))",
        "tl.store(first + i * step, EMPTY, mask=_sent(ctx, mask, i, own) & (i > 0))",
        EXCHANGE,
    ),
    Fault(
        "words are summed in their own dtype",
        "iris/device/lamport.py",
        "    if dtype.is_floating():\n        return tl.float32\n",
        "    if dtype.is_floating():\n        return dtype\n",
        EXCHANGE,
    ),
    Fault(
        "the first source is blamed for all blocks",
        "iris/device/lamport.py",
        "tl.max(tl.where(words == EMPTY, source + i, -1))",
        "tl.max(tl.where(words == EMPTY, source, -1))",
        (*LOST, *EPOCHS),
    ),
    Fault(
        "taking a lock does not acquire",
        "iris/device/lock.py",
        'ctx.heap_bases(), sem="acquire", scope="sys") == 0',
        'ctx.heap_bases(), sem="relaxed", scope="sys") == 0',
        PTX,
    ),
]

CCL = [
    Fault(
        "a reduce-scatter by flags has one slot",
        "iris/ccl/flags.py",
        "slot = 0 if GATHER else epoch & 1",
        "slot = 0",
        COLLECTIVES,
    ),
    Fault(
        "a gather by flags ends before its parts are here",
        "iris/ccl/flags.py",
        "        wait_others(ctx, done + lane, LANES, epoch, WAITER)\n",
        "        pass\n",
        COLLECTIVES,
    ),
    Fault(
        "words go to the wrong peer first",
        "iris/ccl/lamport.py",
        "return item // OTHERS, (ctx.rank + 1 + item % OTHERS) % WORLD_SIZE",
        "return item // OTHERS, (ctx.rank + item % OTHERS) % WORLD_SIZE",
        COLLECTIVES,
    ),
    Fault(
        "words of all calls share a slot",
        "iris/ccl/lamport.py",
        "slot = staging + tl.cast(epoch & 1, tl.int64) * slot_words",
        "slot = staging + tl.cast(epoch & 0, tl.int64) * slot_words",
        COLLECTIVES,
    ),
    Fault(
        "a ring rounds at each step",
        "iris/ccl/ring.py",
        'total += tl.load(staging + spot + element, mask=mask, other=0, cache_modifier=".cg")',
        'total += tl.load(staging + spot + element, mask=mask, other=0, cache_modifier=".cg")\n'
        "                        total = total.to(inp.dtype.element_ty).to(wide)",
        COLLECTIVES,
    ),
    Fault(
        "sums are left behind for the next call but one",
        "iris/ccl/accumulate.py",
        "            tl.store(place, tl.zeros((BLOCK,), staging.dtype.element_ty))\n",
        "",
        COLLECTIVES,
    ),
    Fault(
        "a part has no end of its own",
        "iris/ccl/view.py",
        "mask = (index < self.n) & (unit * BLOCK + lane < self.limit)",
        "mask = index < self.n",
        COLLECTIVES,
    ),
    Fault(
        "who owns nothing may scatter in words",
        "iris/ccl/plan.py",
        "return not problem.cols and problem.part * (problem.world_size - 1) < problem.n",
        "return not problem.cols and problem.part * (problem.world_size - 1) <= problem.n",
        COLLECTIVES,
    ),
    Fault(
        "nobody waits for a grown workspace",
        "iris/ccl/workspace.py",
        "            self.group.barrier()\n",
        "            pass\n",
        COLLECTIVES,
    ),
]

OPS_KERNELS = [
    Fault(
        "a gather's short last part has whole rows",
        "iris_ops/kernels/gather_matmul.py",
        "        rows = min(M - first, part_rows)\n",
        "        rows = part_rows\n",
        OPS,
    ),
    Fault(
        "a gather multiplies its peers' rows in the wrong order",
        "iris_ops/kernels/tile_orders.py",
        "part = (rank + WORLD_SIZE - inside // per_part) % WORLD_SIZE",
        "part = (rank + inside // per_part) % WORLD_SIZE",
        (*OPS, *ORDER, "tests/iris_ops/test_traced.py"),
    ),
    Fault(
        "a gather waits for the first piece of rows only",
        "iris_ops/kernels/gather_matmul.py",
        "for piece in range(PIECES):",
        "for piece in range(1):",
        (*OPS, *EPOCHS),
    ),
    Fault(
        "who has no tile lets a gather's rows come late",
        "iris_ops/kernels/gather_matmul.py",
        "if (num_n == 0) & (tl.program_id(0) == 0):",
        "if (num_n < 0) & (tl.program_id(0) == 0):",
        OPS,
    ),
    Fault(
        "a part's edge is that of the whole",
        "iris_ops/kernels/matmul_gather.py",
        "C = Matrix(out + start, M, N, stride_om, stride_on, False)",
        "C = Matrix(out + start, max(M, row_step), N, stride_om, stride_on, False)",
        OPS,
    ),
    Fault(
        "who has no tile does not wait for the peers",
        "iris_ops/kernels/matmul_gather.py",
        "    if not entered:\n        ok = await_entered(ctx, sync, epoch, WAITER, out)\n    leave(",
        "    leave(",
        (*OPS, *EPOCHS),
    ),
    Fault(
        "a short part of columns is stored too wide",
        "iris_ops/kernels/matmul_reduce.py",
        "own_cols = cols - ctx.rank * part_cols if BY_COLS else cols",
        "own_cols = cols",
        OPS,
    ),
    Fault(
        "staged tiles are added in their own dtype",
        "iris_ops/kernels/matmul_reduce.py",
        'acc += tl.load(staged, mask=own_row[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)',
        "acc = arch.round_to(acc, dtype).to(tl.float32) + tl.load(staged, mask=own_row[:, None], other=0.0).to("
        "tl.float32)",
        OPS,
    ),
    Fault(
        "every owner adds the bias of the first columns",
        "iris_ops/kernels/lamport_matmul.py",
        "total = add_bias(total, bias + before, col, own_cols, BLOCK_N)",
        "total = add_bias(total, bias, col, own_cols, BLOCK_N)",
        FEW_ROWS,
    ),
    Fault(
        "few rows add the bias on every rank",
        "iris_ops/kernels/lamport_matmul.py",
        "        partial = seal(product, dtype)\n",
        "        if HAS_BIAS and EXCHANGE == 'all':\n"
        "            product = add_bias(product, bias, col, N, BLOCK_N)\n"
        "        partial = seal(product, dtype)\n",
        FEW_ROWS,
    ),
    Fault(
        "few rows do not advance their epoch",
        "iris_ops/kernels/lamport_matmul.py",
        "    advance(sync, epoch)",
        "    pass",
        FEW_ROWS,
    ),
    Fault(
        "who gets no rows does not hear from all",
        "iris_ops/kernels/lamport_matmul.py",
        "        exchange.hear_from_peers(dtype)\n",
        "        pass\n",
        FEW_ROWS,
    ),
    Fault(
        "a last part along K is as wide as the others",
        "iris_ops/kernels/lamport_steps.py",
        "                cols = part_at(cols, self.part_cols, source)\n",
        "                cols = self.part_cols\n",
        FEW_ROWS,
    ),
    Fault(
        "programs see gathered rows before they are stored",
        "iris_ops/kernels/lamport_gather_matmul.py",
        'tl.atomic_add(sync + 1, 1, sem="acq_rel", scope="gpu")',
        'tl.atomic_add(sync + 1, 1, sem="relaxed", scope="gpu")',
        PTX,
    ),
    Fault(
        "others' early tiles are counted once",
        "iris_ops/kernels/tile_orders.py",
        "late = t - early * others",
        "late = t - early",
        ORDER,
    ),
    Fault(
        "the last group of row blocks is as high as the first",
        "iris_ops/kernels/tile_orders.py",
        "height = tl.minimum(num_m - first, group_m)",
        "height = group_m",
        (*ORDER, *OPS),
    ),
    Fault(
        "parts of tiles cut in three are mixed up",
        "iris_ops/kernels/stream_k.py",
        "                for i in range(SPLITS - 1):\n                    number = tile * (SPLITS - 1) + i\n",
        "                for i in range(SPLITS - 1):\n                    number = tile + i\n",
        OPS,
    ),
    Fault(
        "the last steps of a shared tile are nobody's",
        "iris_ops/kernels/stream_k.py",
        "(end >= border)",
        "(end > border)",
        ORDER,
    ),
    Fault(
        "an odd number of columns is gated",
        "iris_ops/local/gated_matmul.py",
        " or B.shape[1] % 2:",
        ":",
        GATED,
    ),
    Fault(
        "the second half gates the first",
        "iris_ops/local/gating.py",
        "values = arch.round_to(gate / (1.0 + tl.exp(-gate)) * second, out.dtype.element_ty)",
        "values = arch.round_to(second / (1.0 + tl.exp(-second)) * gate, out.dtype.element_ty)",
        GATED,
    ),
    Fault(
        "sums of squares of wide tiles keep what was there",
        "iris_ops/kernels/rmsnorm_epilogue.py",
        "mask=(r < M) & (col + i * SPAN < N))",
        "mask=r < 0)",
        NORM,
    ),
    Fault(
        "squares are those of the sum before it is rounded",
        "iris_ops/kernels/rmsnorm_epilogue.py",
        "h = tl.where(inside, arch.round_to(total + residual.to(tl.float32), dtype).to(tl.float32), 0.0)",
        "h = tl.where(inside, total + residual.to(tl.float32), 0.0)",
        NORM,
    ),
    Fault(
        "a column of exact powers has twice the scale",
        "iris_ops/fp8/scaled_matmul.py",
        "exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-100, 100)",
        "exponent = exponent.clamp(-100, 100)",
        FP8,
    ),
    Fault(
        "a row of zeros is divided by zero",
        "iris_ops/fp8/scaled_matmul.py",
        "scale = tl.maximum(tl.max(largest, 0), 2.0**-100) / 448.0",
        "scale = tl.max(largest, 0) / 448.0",
        FP8,
    ),
    Fault(
        "what two ranks swap is not written through",
        "iris_ops/kernels/hopper/lamport_pair.py",
        'gl.store(target, values, mask=mask, cache_modifier=".wt")',
        "gl.store(target, values, mask=mask)",
        PTX,
    ),
    Fault(
        "a finished tile is handed over without a barrier",
        "iris_ops/kernels/hopper/pipeline.py",
        "            program_barrier()\n            mbarrier.arrive(shared.ready.index(place), count=1)\n",
        "            mbarrier.arrive(shared.ready.index(place), count=1)\n",
        PTX,
        "none is wrong: Triton then puts a barrier of its own in that place",
    ),
    Fault(
        "moving warps sum the tile of another place",
        "iris_ops/kernels/hopper/matmul_reduce.py",
        "sources = sources + (staging + (peer * owned + slot).to(gl.int64) * ELEMENTS,)",
        "sources = sources + (staging + (peer * owned).to(gl.int64) * ELEMENTS,)",
        PTX,
        ON_HOPPER,
    ),
    Fault(
        "two ranks swap in one slot",
        "iris_ops/kernels/hopper/lamport_pair.py",
        "slot = staging + (epoch & 1).to(gl.int64) * slot_words",
        "slot = staging + (epoch & 0).to(gl.int64) * slot_words",
        PTX,
        ON_HOPPER,
    ),
]

PLANNER = [
    Fault(
        "our kernel has no lead over several launches",
        "iris_ops/planning/plan.py",
        "weighed = prediction.total_us + min(lead * prediction.total_us, most)",
        "weighed = prediction.total_us",
        PLAN,
    ),
    Fault(
        "any size is exchanged in words",
        "iris_ops/planning/ways.py",
        "travels <= way.most(problem)",
        "travels <= 16 * way.most(problem)",
        PLAN,
    ),
    Fault(
        "an all-reduce sends everything once",
        "iris_ops/problem.py",
        "return size * others * (2 if self.op == ALL_REDUCE else 1)",
        "return size * others",
        PLAN,
    ),
    Fault(
        "one rank pays for hops",
        "iris_ops/planning/overlap_model.py",
        "return 0 if problem.world_size == 1 else hops",
        "return hops",
        PLAN,
    ),
    Fault(
        "the link's time is not in microseconds",
        "iris_ops/planning/overlap_model.py",
        "return tiles * _tile_bytes(problem, config) / (machine.link_gbs * 1e3)",
        "return tiles * _tile_bytes(problem, config) / (machine.link_gbs * 1e6)",
        PLAN,
    ),
    Fault(
        "weights of few rows are read once only",
        "iris_ops/planning/tile_model.py",
        "again = 1 + _READ_AGAIN * (-(-m // bm) - 1) if few_rows and not config.warp_specialised else 1",
        "again = 1",
        PLAN,
    ),
    Fault(
        "a round that is not full takes no time",
        "iris_ops/planning/tile_model.py",
        "rounds = -(-(tiles - cut) // programs)",
        "rounds = (tiles - cut) // programs",
        PLAN,
    ),
    Fault(
        "one round of tiles is cut only where it is not full",
        "iris_ops/planning/waves.py",
        "return tiles % programs if tiles >= 2 * programs else tiles",
        "return tiles % programs",
        (*PLAN, *ORDER),
    ),
    Fault(
        "a pair of ranks mixes its tiles",
        "iris_ops/planning/waves.py",
        "if problem.op != ALL_REDUCE or problem.world_size < 3 or owned <= early:",
        "if problem.op != ALL_REDUCE or problem.world_size < 2 or owned <= early:",
        (*PLAN, *ORDER),
    ),
    Fault(
        "two shots have no room for their sums",
        "iris_ops/planning/workspace_size.py",
        'behind = rows * w * exchange_ld(cols) if config.algorithm == "two_shot" else exchange_ld(w)',
        "behind = exchange_ld(w)",
        (*OPS, *EPOCHS),
    ),
    Fault(
        "shared memory has no barriers in it",
        "iris_ops/planning/machine.py",
        "return (self.shared_bytes - _BARRIER_BYTES) // block_bytes",
        "return self.shared_bytes // block_bytes",
        PLAN,
    ),
    Fault(
        "norms end in kernels that cannot",
        "iris_ops/planning/kernel_names.py",
        "return ends and config.block_n % NORM_SPAN == 0",
        "return ends",
        (*NORM, *PLAN),
    ),
    Fault(
        "finished tiles take no shared memory",
        "iris_ops/config.py",
        "nbytes = 2 * (ring + places * self.block_m * self.block_n)",
        "nbytes = 2 * ring",
        ARGUMENTS,
    ),
    Fault(
        "columns are shared out where rows are more even",
        "iris_ops/problem.py",
        "return (rows, problem.N, False) if rows * problem.N <= problem.M * cols else (problem.M, cols, True)",
        "return (rows, problem.N, False) if rows * problem.N > problem.M * cols else (problem.M, cols, True)",
        (*PLAN, *ORDER),
    ),
    Fault(
        "a scale of any shape will do",
        "iris_ops/checks.py",
        "if B.ndim == 2 and tuple(scale.shape) != (B.shape[1],):",
        "if B.ndim == 3 and tuple(scale.shape) != (B.shape[1],):",
        (*ARGUMENTS, *FP8),
    ),
    Fault(
        "an expanded out is written",
        "iris_ops/checks.py",
        "if out.numel() and any(size > 1 and stride == 0",
        "if out.numel() and any(size > 1 and stride < 0",
        ARGUMENTS,
    ),
    Fault(
        "the first parts are rounded down",
        "iris_ops/problem.py",
        "    return -(-size // world_size)\n",
        "    return max(1, size // world_size)\n",
        PLAN,
    ),
]

LAYERS = [
    Fault(
        "columns begin at an element in place of a byte",
        "layers/checkpoint/files.py",
        "start += bounds[1][0] * math.prod(self.shape[2:]) * self.dtype.itemsize",
        "start += bounds[1][0] * math.prod(self.shape[2:])",
        LOADER,
    ),
    Fault(
        "a file's dtype is taken for the model's",
        "layers/checkpoint/files.py",
        "self.staging.read(self.file, *self._place(index), local, self.dtype)",
        "self.staging.read(self.file, *self._place(index), local, local.dtype)",
        LOADER,
    ),
    Fault(
        "a file may be longer than its header says",
        "layers/checkpoint/files.py",
        "if 8 + length + end != size:",
        "if 8 + length + end > size:",
        LOADER,
    ),
    Fault(
        "tensors may overlap in a file",
        "layers/checkpoint/files.py",
        "        if start != end:\n",
        "        if start > end:\n",
        LOADER,
    ),
    Fault(
        "the index is not asked where a tensor is",
        "layers/checkpoint/files.py",
        "listed_in = name if index is None else index.get(tensor)",
        "listed_in = name",
        LOADER,
    ),
    Fault(
        "the second buffer of a tensor begins at the wrong row",
        "layers/checkpoint/buffers.py",
        "yield rows, start + first * stride,",
        "yield rows, start + first * row,",
        LOADER,
    ),
    Fault(
        "a short read is taken for a whole one",
        "layers/checkpoint/buffers.py",
        "moved = transfer(file, [memory[done:]], offset + done)",
        "moved = transfer(file, [memory[done:]], offset)",
        LOADER,
    ),
    Fault(
        "an idle rank's head is counted twice",
        "layers/shard.py",
        "        if self.idle:\n",
        "        if False:\n",
        SHARDS,
    ),
    Fault(
        "uneven heads go to the last ranks",
        "layers/shard.py",
        "return start, start + base + (rank < extra)",
        "return start, start + base + (rank > extra)",
        SHARDS,
    ),
    Fault(
        "merged outputs are counted by their parts",
        "layers/shard.py",
        "        offset += part.total\n",
        "        offset += part.size\n",
        SHARDS,
    ),
    Fault(
        "a source of another shape is loaded",
        "layers/sharded.py",
        "        if given != expected:\n",
        "        if len(given) != len(expected):\n",
        SHARDS,
    ),
    Fault(
        "a second output is loaded over the first",
        "layers/sharded.py",
        "before = sum(each.size for each in self.parts[:part]) if part else 0",
        "before = 0",
        SHARDS,
    ),
    Fault(
        "another rank's state is loaded",
        "layers/sharded.py",
        "        if held == own:\n",
        "        if held[1] == own[1]:\n",
        ("tests/layers/test_lifecycle.py",),
    ),
    Fault(
        "every rank adds the bias of a partial sum",
        "layers/linear.py",
        "out = self.local_product(x, biased=self.ctx.cur_rank == 0)",
        "out = self.local_product(x, biased=True)",
        SHARDS,
    ),
    Fault(
        "a stored integer may be a weight",
        "layers/checkpoint/names.py",
        ".is_floating_point != floating[name]:",
        ".is_complex != False:",
        LOADER,
    ),
    Fault(
        "a tensor's second range is saved from its first",
        "layers/checkpoint/save.py",
        "            place.copy_from(piece, index)\n            at += stop - start\n",
        "            place.copy_from(piece, index)\n",
        LOADER,
    ),
    Fault(
        "a file may be larger than asked by a tensor",
        "layers/checkpoint/save.py",
        "if shards[-1] and size + each.nbytes > most:",
        "if shards[-1] and size > most:",
        LOADER,
    ),
    Fault(
        "the first new token has its prompt's last position",
        "layers/serving/engine.py",
        "self.positions.copy_(positions[:, -1:] + 1)",
        "self.positions.copy_(positions[:, -1:])",
        ENGINE,
    ),
    Fault(
        "padding in front is counted as positions",
        "layers/serving/engine.py",
        "positions = (seen.cumsum(-1) - 1).clamp(min=0)",
        "positions = (torch.ones_like(seen).cumsum(-1) - 1).clamp(min=0)",
        ENGINE,
    ),
    Fault(
        "the token that reaches top_p is left out",
        "layers/serving/sampling.py",
        "before = probable.cumsum(-1) - probable",
        "before = probable.cumsum(-1)",
        ENGINE,
    ),
    Fault(
        "tokens of the last part of the vocabulary are numbered wrongly",
        "layers/serving/sampling.py",
        "return part * (logits.shape[-1] // parts) + at.gather(-1, part)",
        "return part * (logits.shape[-1] // _PARTS) + at.gather(-1, part)",
        ENGINE,
    ),
    Fault(
        "a stretch of the cache ends a row early",
        "iris_ops/local/decode_attention.py",
        "    end = min(begin + stretch, length)\n",
        "    end = min(begin + stretch, length - 1)\n",
        ATTENTION,
    ),
    Fault(
        "sums of an earlier block do not fade",
        "iris_ops/local/decode_attention.py",
        "total = total * fade + tl.sum(chances, 1)",
        "total = total + tl.sum(chances, 1)",
        ATTENTION,
    ),
    Fault(
        "the gate of a step has the bias of the other half",
        "iris_ops/local/skinny_matmul.py",
        "up = _finished(up, bias + N if HAS_BIAS else bias,",
        "up = _finished(up, bias,",
        STEPS,
    ),
    Fault(
        "a norm's factor is of half the columns",
        "iris_ops/local/skinny_matmul.py",
        "factors = 1.0 / tl.sqrt(tl.sum(sums, 0) / K + eps)[None, :]",
        "factors = 1.0 / tl.sqrt(tl.sum(sums, 0) / (K // 2) + eps)[None, :]",
        STEPS,
    ),
    Fault(
        "a freed block stays in the digest",
        "iris/heap.py",
        "            self.lent.discard(offset)\n        else:\n            self.digest ^= _mark(block)\n",
        "            self.lent.discard(offset)\n",
        (*HEAPS, "tests/iris/test_tensors.py"),
    ),
]

EXPERTS = [
    Fault(
        "a second block of an expert's rows begins a row late",
        "iris_ops/moe/grouped.py",
        "first = tl.sum(tl.where(own, begins + (block - (upto - blocks)) * BLOCK_M, 0))",
        "first = tl.sum(tl.where(own, begins + (block - (upto - blocks)) * (BLOCK_M + 1), 0))",
        MIXTURES,
    ),
    Fault(
        "pairs of an expert are sorted within their block only",
        "iris_ops/moe/routing.py",
        "place = tl.gather(begins + before, known, 0)",
        "place = tl.gather(begins, known, 0)",
        MIXTURES,
    ),
    Fault(
        "up is not bounded from below",
        "iris_ops/moe/grouped.py",
        "up = tl.clamp(up, -LIMIT, LIMIT",
        "up = tl.clamp(up, -8 * LIMIT, LIMIT",
        MIXTURES,
    ),
    Fault(
        "every rank adds the bias of the product back",
        "iris_ops/moe/lamport_down.py",
        "once = bias if ctx.cur_rank == 0 else None",
        "once = bias",
        MIXTURES,
    ),
    Fault(
        "a token has the factor of the one before",
        "iris_ops/moe/combine.py",
        "factor = tl.load(weights + t.to(tl.int64) * stride_wt + j",
        "factor = tl.load(weights + tl.maximum(t - 1, 0).to(tl.int64) * stride_wt + j",
        MIXTURES,
    ),
    Fault(
        "the last program of some columns does not clear its count",
        "iris_ops/moe/lamport_down.py",
        "        tl.store(counts + tile_n, 0)\n",
        "",
        MIXTURES,
    ),
    Fault(
        "an index below 0 passes",
        "iris_ops/moe/grouped.py",
        "report_experts(ctx, expert, (expert < 0) | (expert >= experts), experts, WAITER)",
        "report_experts(ctx, expert, expert >= experts, experts, WAITER)",
        MIXTURES,
    ),
]

FAULTS = [*DEVICE, *CCL, *OPS_KERNELS, *EXPERTS, *PLANNER, *LAYERS]
