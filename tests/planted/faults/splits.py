"""What leaves a model as it was where it cannot be split, and what a split one does under autocast."""

from .fault import Fault

_ATOMIC = "tests/layers/test_atomic.py::test_a_split_that_fails_leaves_the_model_as_it_was"
_NO_TENSORS = ("tests/layers/test_refused_models.py::test_weights_that_are_no_plain_tensors_are_refused_by_name",)
_FINDS_NOTHING = "tests/layers/test_refused_models.py::test_a_plan_that_finds_nothing_is_refused"
_HEAD_ONLY = "tests/layers/test_refused_models.py::test_a_plan_of_the_head_only_is_refused_unless_partial"
_PLANS = "tests/layers/test_refused_plans.py::test_what_would_fail_in_its_first_forward_is_refused_by_name"
_RECURRENT = "tests/layers/test_recurrent_heads.py"
_AUTOCAST = "tests/layers/test_autocast.py::test_each_linear_multiplies_in_autocasts_dtype"

SPLITS = [
    Fault(
        "a split that fails leaves what it has swapped",
        "layers/hf/parallelize.py",
        "        before.restore()\n        raise",
        "        raise",
        (_ATOMIC,),
    ),
    Fault(
        "a model is put back after our own errors only",
        "layers/hf/parallelize.py",
        "    except BaseException:\n        before.restore()",
        "    except IrisError:\n        before.restore()",
        (_ATOMIC,),
    ),
    Fault(
        "a model that is put back keeps its parts' hooks and lists",
        "layers/hf/snapshot.py",
        "            container.clear()\n",
        "            continue\n",
        (_ATOMIC,),
    ),
    Fault(
        "a rank that fails keeps it to itself",
        "layers/together.py",
        "        if failure:\n            kind, text = failure\n            raise kind",
        "        if False:\n            kind, text = failure\n            raise kind",
        (_ATOMIC,),
    ),
    Fault(
        "a weight of another class is split",
        "layers/hf/styles.py",
        "if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout is not torch.strided:",
        "if tensor.layout is not torch.strided:",
        _NO_TENSORS,
    ),
    Fault(
        "what lies beside a weight is lost",
        "layers/hf/styles.py",
        '        if key not in ("weight", "bias"):\n',
        "        if False:\n",
        _NO_TENSORS,
    ),
    Fault(
        "a plan is not tried",
        "layers/hf/parallelize.py",
        "proof.prove(whole, part, tried.parents(styles_of.ROW) + tried.recurrent, tried.cutting(whole))",
        "[]",
        tuple(f"{_PLANS}[{case}-2]" for case in ("n_heads", "a bias by head", "a reshape")),
    ),
    Fault(
        "a plan that is tried may compute with other numbers",
        "layers/hf/proof.py",
        "        if not (is_ours or (run.ops[here].is_cut and name in run.packed)):\n",
        "        if False:\n",
        (_PLANS,),
    ),
    Fault(
        "a plan may leave all layers whole",
        "layers/hf/parallelize.py",
        "        styles_of.check_layers(model, [*linears, *experts, *recurrent], filter_fn is not None)\n",
        "        pass\n",
        (_HEAD_ONLY, _FINDS_NOTHING),
    ),
    Fault(
        "a plan of names that a wrapper has not is one",
        "layers/hf/styles.py",
        "    if inside:\n        return\n",
        "    if inside or not linears:\n        return\n",
        (_FINDS_NOTHING,),
    ),
    Fault(
        "partial allows nothing",
        "layers/hf/parallelize.py",
        "if automatic and not partial:",
        "if automatic:",
        (_HEAD_ONLY,),
    ),
    Fault(
        "a projection's name tells its layout",
        "layers/hf/proof.py",
        "        self._check_fused(function, args, out)\n",
        "",
        ("tests/layers/test_fused_heads.py::test_a_known_name_of_another_layout_is_refused",),
    ),
    Fault(
        "a norm of a group is one of a rank's channels",
        "layers/hf/gated_norm.py",
        "        if self.shared:\n            squares",
        "        if False:\n            squares",
        (f"{_RECURRENT}::test_prompts_and_steps_are_the_unsplit_models[one group-2]",),
    ),
    Fault(
        "an idle rank's channels count in a norm",
        "layers/hf/gated_norm.py",
        "not self._held.idle",
        "1",
        (f"{_RECURRENT}::test_a_checkpoint_is_read_and_written_by_parts[two heads-3]",),
    ),
    Fault(
        "the blocks of a group lie side by side",
        "layers/hf/recurrent_heads.py",
        "self._by_group(held) if self.by_group else",
        "",
        (f"{_RECURRENT}::test_prompts_and_steps_are_the_unsplit_models[three key heads-3]",),
    ),
    Fault(
        "buffers that are computed stay whole",
        "layers/checkpoint/load.py",
        "        split_parameter(owner, key, part, dim)\n",
        "        pass\n",
        (f"{_RECURRENT}::test_a_checkpoint_is_read_and_written_by_parts[no norm-2]",),
    ),
    Fault(
        "an input is not in autocast's dtype",
        "layers/sharded.py",
        "            x, dtype = autocast(x, self._device_type), autocast_dtype(dtype, self._device_type)\n",
        "            pass\n",
        (_AUTOCAST,),
    ),
    Fault(
        "a weight is not in autocast's dtype",
        "layers/sharded.py",
        "            weight = weight if self.weight_scale is not None else weight.to(dtype)\n",
        "            pass\n",
        (_AUTOCAST,),
    ),
    Fault(
        "a weight is in autocast's dtype where nothing is exchanged only",
        "layers/sharded.py",
        "        weight, bias = self.terms(x.dtype)\n        if self._depths",
        "        weight, bias = self.weight, self.bias\n        if self._depths",
        (_AUTOCAST,),
    ),
    Fault(
        "an engine may be made under autocast",
        "layers/serving/engine.py",
        "        check_no_autocast(device.type)\n",
        "",
        ("tests/layers/test_autocast.py::test_an_engine_under_autocast_is_refused",),
    ),
]
