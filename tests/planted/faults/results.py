"""What keeps a wrong result from coming without a word: each fault takes one of these checks away."""

from .fault import HEAPS, Fault

_HEAPS = f"{HEAPS[0]}::"
_PLACES = "tests/iris/test_places_of_results.py::"
_PLANS = "tests/layers/test_refused_plans.py::test_what_would_fail_in_its_first_forward_is_refused_by_name"
_FOLDER = "tests/layers/test_folder.py::test_what_transformers_would_act_on_is_refused_by_name"
_INDEXES = "tests/layers/test_malformed.py::test_indexes"
_AGREEMENT = "tests/iris/test_agreement.py::"
_THREADS = (f"{_HEAPS}test_a_context_belongs_to_one_thread",)
_WORKER = "tests/layers/test_generation.py::test_a_worker_thread_generates_once_it_has_taken_the_context_over"
_ENTRY = "tests/layers/test_generation.py::test_what_would_part_the_ranks_or_end_a_gpu_is_refused_at_entry"
_NARROW = "tests/iris/test_narrow_floats.py"
_GUARDS = ("tests/layers/test_guards.py",)
_INPUTS = ("tests/layers/test_inputs.py::test_other_inputs_on_a_rank_are_found",)
_ASKED = ("tests/layers/test_bad_checkpoints.py::test_ranks_ask_for_the_same_model",)
_GRADIENTS = ("tests/layers/test_gradients.py::test_every_layer_refuses_gradients_and_runs_without",)
_REPLAY = "tests/soak/test_soak.py::test_a_replay_keeps_what_its_graph_refers_to"

ALLOCATIONS = [
    Fault(
        "workspaces come from the users' end of the heap",
        "iris/heap.py",
        'of {dtype} of a workspace", library=True)',
        'of {dtype} of a workspace", library=False)',
        (f"{_HEAPS}test_workspaces_are_not_shifted",),
    ),
    Fault(
        "barriers compare no heaps",
        "iris/rank.py",
        "self._barrier(members, self.heap.digest)",
        "self._barrier(members)",
        (f"{_HEAPS}test_allocations_that_differ_are_found_wherever_ranks_meet",),
    ),
    Fault(
        "where an op's workspace grows no heaps are compared",
        "iris_ops/workspace.py",
        "        if grown:\n            self.ctx.barrier()  #",
        "        if grown:\n            self.meet()  #",
        (f"{_HEAPS}test_growing_finds_allocations_that_differ",),
    ),
    Fault(
        "a context closes without a look at the other heaps",
        "iris/context.py",
        "            if not self._record_view[0] and self.hosts.lost is None:\n                self.barrier()",
        "            if False:\n                self.barrier()",
        (f"{_HEAPS}test_allocations_that_differ_are_found_wherever_ranks_meet[close]",),
    ),
    Fault(
        "the last allocation that differs is blamed",
        "iris/heap.py",
        "first = min((block.library, block.number) for block in rest)",
        "first = max((block.library, block.number) for block in rest)",
        (f"{_HEAPS}test_allocations_that_differ_are_found_wherever_ranks_meet[barrier]",),
    ),
    Fault(
        "nobody looks where the peers have their results",
        "iris/device/places.py",
        "    return _all_same(ctx, out, differing, waiter)\n\n\n@device_function\ndef moved_out(",
        "    return True\n\n\n@device_function\ndef moved_out(",
        (f"{_PLACES}test_results_at_different_places_are_found[matmul_all_reduce-another tensor-2]",),
    ),
    Fault(
        "nobody looks where one peer has its results",
        "iris/device/places.py",
        "    return _all_same(ctx, out, tl.where(_told(place) == place_of(ctx, out), -1, peer), waiter)",
        "    return True",
        (_PLACES + "test_results_at_different_places_are_found",),
    ),
    Fault(
        "a ragged part takes as much as it has itself",
        "iris/tensors.py",
        "plan.dtype, max(nbytes for _, nbytes, _ in told))",
        "plan.dtype, plan.nbytes)",
        (f"{_HEAPS}test_ragged_parts_take_the_same_place_on_all_ranks",),
    ),
]

THREADS = [
    Fault(
        "any thread may use a context",
        "iris/rank.py",
        "if self._closed or self._record_view[0] or threading.get_ident() != self._thread:",
        "if self._closed or self._record_view[0]:",
        (*_THREADS, _WORKER),
    ),
    Fault(
        "any thread may close a context",
        "iris/context.py",
        "            return\n        self._check_thread()\n        try:",
        "            return\n        try:",
        _THREADS,
    ),
    Fault(
        "a context cannot be handed over",
        "iris/rank.py",
        "            self._refuse()\n        self._thread = threading.get_ident()",
        "            self._refuse()",
        _THREADS,
    ),
]

ENTRIES = [
    *(
        Fault(
            f"{method} is called on a split model",
            "layers/hf/guards.py",
            f'    "{method}": {remedy},\n',
            "",
            (test,),
        )
        for method, remedy, test in (
            ("resize_token_embeddings", "_BEFORE", *_GUARDS),
            ("init_weights", '"each rank would draw weights of its own; " + _BEFORE', *_GUARDS),
            ("add_adapter", '"merge the adapter into the unsplit model, and split that"', *_GUARDS),
            ("generate_batch", "BATCHING", _ENTRY),
            ("continuous_batching_context_manager", "BATCHING", _ENTRY),
            ("init_continuous_batching", "BATCHING", _ENTRY),
        )
    ),
    Fault(
        "a manager of batches takes a split model",
        "layers/hf/generation.py",
        "    if not args and not kwargs:  # generate() says more\n",
        "    if False:\n",
        (_ENTRY,),
    ),
    Fault(
        "a paged cache passes",
        "layers/hf/generation.py",
        'if self.setting("cache_implementation") == "paged":',
        'if self.setting("cache_implementation") == "none":',
        (_ENTRY,),
    ),
    Fault(
        "ranks draw by their own seeds",
        "layers/hf/generation.py",
        "        share_rng(ctx)\n        own =",
        "        own =",
        ("tests/layers/test_generation.py::test_all_ranks_draw_the_unsplit_models_tokens",),
    ),
    Fault(
        "tie_weights is the class's own",
        "layers/hf/guards.py",
        "        model.tie_weights = MethodType(_tie_weights, model)\n",
        "        pass\n",
        _GUARDS,
    ),
    Fault(
        "a head is tied to what it was not split from",
        "layers/hf/guards.py",
        'if getattr(held.get(parent), "tied_to", None) != source and (parent in held or other in held):',
        "if False:",
        _GUARDS,
    ),
    Fault(
        "a column may be asked for a gradient",
        "layers/sharded.py",
        "        if may_differentiate():\n",
        "        if may_differentiate() and (self.dim or self.op != LOCAL):\n",
        _GRADIENTS,
    ),
]

COMPARED = [
    Fault(
        "a bias on one rank only is not compared",
        "iris_ops/calls.py",
        '            "bias": "none" if call.tensors.bias is None else "given",\n',
        "",
        (f"{_AGREEMENT}test_what_differs_is_said_on_every_rank[bias]",),
    ),
    Fault(
        "a collective's variant is not compared",
        "iris/ccl/collectives.py",
        '{"shapes": problem, "plan": chosen, "async_op": async_op}',
        '{"shapes": problem, "async_op": async_op}',
        (f"{_AGREEMENT}test_what_differs_is_said_on_every_rank[variant]",),
    ),
    Fault(
        "a refusal is not told",
        "iris/rank.py",
        "self.compare(call, members, **{REFUSAL: error})",
        "pass",
        (f"{_AGREEMENT}test_what_differs_is_said_on_every_rank[refusal]",),
    ),
    Fault(
        "generate compares no tokens",
        "layers/hf/generation.py",
        '        compare(ctx, "generate", own=self.generation_config, **given.arguments)\n',
        "",
        _INPUTS,
    ),
    Fault(
        "an engine compares no tokens",
        "layers/serving/engine.py",
        "**asked, tokens=prompts)",
        "**asked)",
        _INPUTS,
    ),
    Fault(
        "a forward compares no tokens",
        "layers/digests.py",
        "        model.register_forward_pre_hook(_Compare(ctx, type(model).__name__), with_kwargs=True)\n",
        "        pass\n",
        _INPUTS,
    ),
    Fault(
        "each rank may load a path of its own",
        "layers/checkpoint/load.py",
        '{"path_or_id": None if refusal else _place(path_or_id), **asked}',
        "asked",
        _ASKED,
    ),
    Fault(
        "each rank may load by options of its own",
        "layers/checkpoint/load.py",
        '"trust_remote_code": trust_remote_code, **options}',
        '"trust_remote_code": trust_remote_code}',
        _ASKED,
    ),
]

READ_OTHERWISE = [
    Fault(
        "a forward may read a split weight",
        "layers/hf/parallelize.py",
        "        weight_reads.check(whole, tried.linears)\n",
        "",
        (_PLANS,),
    ),
    Fault(
        "the dry run does not see who reads a split weight",
        "layers/hf/proof.py",
        "            if id(each) in self._weights and not _caller()[1]:\n",
        "            if False:\n",
        (_PLANS,),
    ),
    Fault(
        "an adapter is left out",
        "layers/checkpoint/folder.py",
        "        if CONFIG in names and names & {SINGLE, INDEX}:\n",
        "        if CONFIG in names and names & {SINGLE, INDEX}:\n            return\n",
        (_FOLDER,),
    ),
    Fault(
        "a folder of an adapter alone does not say so",
        "layers/checkpoint/folder.py",
        '        base = shown(repr(read_json(folder / _ADAPTER).get("base_model_name_or_path")))\n        raise',
        "        base = None\n        if CONFIG in names:\n            return\n        raise",
        (_FOLDER,),
    ),
    Fault(
        "a checkpoint of torch.distributed beside the weights is left out",
        "layers/checkpoint/folder.py",
        "    if first:\n",
        "    if False:\n",
        (_FOLDER,),
    ),
    Fault(
        "quantised weights are loaded as they are",
        "layers/checkpoint/configuration.py",
        "            if part.get(key):\n",
        "            if False:\n",
        (_FOLDER,),
    ),
    Fault(
        "what a configuration names beside is left out",
        "layers/checkpoint/configuration.py",
        "        if raw.get(key):\n",
        "        if False:\n",
        (_FOLDER,),
    ),
    Fault(
        "a tensor that no index lists is loaded",
        "layers/checkpoint/files.py",
        "                if listed_in is None:\n                    problems.append",
        "                if listed_in is None:\n                    self._tensors[tensor] = tensors[tensor]\n"
        "                    [].append",
        (f"{_INDEXES}[listed nowhere]",),
    ),
    Fault(
        "a tensor elsewhere than listed is left out",
        "layers/checkpoint/files.py",
        "        if index is not None and not problems:\n",
        "        if False:\n",
        (f"{_INDEXES}[stored elsewhere]", f"{_INDEXES}[stored nowhere]"),
    ),
    Fault(
        "a sum of bfloat16 is not rounded",
        "iris/device/interpreter/builder.py",
        "        return _result(op(_numbers(lhs, op), rhs.data), lhs.dtype.scalar)\n",
        "        return TensorHandle(op(_numbers(lhs, op), rhs.data), lhs.dtype.scalar)\n",
        (_NARROW,),
    ),
    Fault(
        "bfloat16 is computed on its bits",
        "iris/device/interpreter/builder.py",
        "    def create_masked_load(",
        "    def create_masked_load_of_numbers(",
        (_NARROW,),
    ),
    Fault(
        "fp8 is computed on its bits",
        "iris/device/interpreter/builder.py",
        '    if dtype.name.startswith("fp8"):\n',
        "    if False:\n",
        (f"{_NARROW}::test_arithmetic_in_fp8_is_refused_by_name",),
    ),
    Fault(
        "fp8 is summed on its bits",
        "iris/device/interpreter/reductions.py",
        "            if each.dtype.is_fp8():\n",
        "            if False:\n",
        (f"{_NARROW}::test_arithmetic_in_fp8_is_refused_by_name[sum-reduction]",),
    ),
    Fault(
        "a graph forgets what it refers to",
        "iris_tp/bench/timing.py",
        "        self.work, self.graph = work, torch.cuda.CUDAGraph()\n",
        "        self.graph = torch.cuda.CUDAGraph()\n",
        (_REPLAY,),
        "a graph is captured on a GPU only",
        (_REPLAY,),
    ),
]

RESULTS = [*ALLOCATIONS, *THREADS, *ENTRIES, *COMPARED, *READ_OTHERWISE]
