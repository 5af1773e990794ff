"""Every private name of Triton that the interpreter's mending reads or replaces, each with its reason.

Written for Triton 3.6. Imported only in a process in which the interpreter is on.

| name | reason |
|---|---|
| `interpreter.InterpreterBuilder` | what an operation does to numpy arrays; `builder.Builder` does it right |
| `interpreter.interpreter_builder`, `interpreter_semantic` | the one builder that all kernels share |
| `interpreter.TensorHandle` | a value: a numpy array and its dtype |
| `interpreter._interpreter` | loads, stores and atomics on addresses, in C |
| `interpreter._get_np_dtype` | which numpy dtype holds a dtype of Triton's: float32 for bfloat16 |
| `interpreter.ReduceScanOpInterface` | reductions and scans, which go past the builder |
| `interpreter.ReduceOps` | reductions, slow for functions that it does not know |
| `interpreter.GridExecutor` | a launch, which looks at the kernel's signature each time |
| `interpreter.InterpreterError`, `_implicit_cvt` | what a launch raises, and how it takes arguments |
| `interpreter.TritonSemantic` | what brings two operands to one type and shape (`quick`) |
| `interpreter._patch_attr` | how the language's functions are given the builder, at each call |
| `interpreter._patch_lang` | puts the builder behind the language, at each launch and call |
| `core.block_type`, `core.tensor` | types and values, which work out the same again and again; operators (`quick`) |
| `core._unwrap_if_constexpr` | asked of each argument of each function (`quick`) |
| `core.dtype.to_ir` | what the builder has types of; Triton's knows fewer |
| `_ir.ROUNDING_MODE`, `ATOMIC_OP`, `PADDING_OPTION` | how an operation is asked for |
"""

from triton._C.libtriton import ir as _ir
from triton.language import standard
from triton.runtime import interpreter

TensorHandle = interpreter.TensorHandle
InterpreterBuilder = interpreter.InterpreterBuilder
InterpreterError = interpreter.InterpreterError
GridExecutor = interpreter.GridExecutor
ReduceOps = interpreter.ReduceOps
ReduceScan = interpreter.ReduceScanOpInterface
Semantic = interpreter.TritonSemantic
builder = interpreter.interpreter_builder
memory = interpreter._interpreter
implicit = interpreter._implicit_cvt
TO_NEAREST = _ir.ROUNDING_MODE.RTNE
PADDED_WITH_NAN = _ir.PADDING_OPTION.PAD_NAN
FLOAT_ADD, EXCHANGE = _ir.ATOMIC_OP.FADD, _ir.ATOMIC_OP.XCHG
XOR, OR = standard._xor_combine, standard._or_combine


def numpy_type(dtype):
    """The numpy dtype of what the interpreter holds for `dtype`: float32 for bfloat16 once `prepare` was called."""
    return interpreter._get_np_dtype(dtype)


def replace_builder(kind: type) -> None:
    """Has `kind` do what kernels ask for, for kernels that are launched from now on."""
    interpreter.InterpreterBuilder = kind
    builder.__class__ = kind
