"""Compile ahead for sm_90, without a GPU: `python -m tests.ahead_probe FOLDER`, for a process without the interpreter.

Prints, as JSON: how many forms the launches of a norm have, the errors of the processes that compile, how many of the
kernels were compiled anew when they were loaded, and whether Triton's folder of the time of loading was used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

from tests import fake_gpu  # noqa: E402


def main(folder: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(folder / "first")
    mode = fake_gpu.pretend("sm_90")
    from iris.launch import ahead
    from iris_ops.local.norm import normed
    import torch
    from triton.backends.nvidia.compiler import CUDABackend

    def calls() -> None:
        for rows in (1, 5, 7, 16):  # 5 and 7 are alike for Triton
            x = torch.empty(rows, 256, dtype=torch.bfloat16, device="cuda")
            normed(x, x[0], 1e-5, x)

    forgotten: list[int] = []
    context = SimpleNamespace(forget_launches=lambda: forgotten.append(1))
    with mode:
        forms = ahead.recorded([context], calls)
    compilers = ahead.Compilers(2)
    compilers.add(forms.values())
    compilers.add([ahead.Form("iris_ops.local.norm", "no_such_kernel", {})])
    first = compilers.wait_for(1, 400)
    compilers.wait()
    waited = first and compilers.wait_for(len(forms) + 1, 0) and not compilers.errors[1:]
    anew: list[object] = []
    make_cubin = CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda *args: anew.append(1) or make_cubin(*args)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "second")  # as Inductor does, meanwhile
    ahead.load(forms.values(), compilers.folder)
    result = {"forms": len(forms), "errors": compilers.errors, "anew": len(anew), "forgotten": len(forgotten)}
    result |= {"waited": waited}
    result |= {"moved": (folder / "second").exists(), "folder": os.environ["TRITON_CACHE_DIR"]}
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
