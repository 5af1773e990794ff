"""The linear layers of the models that the rows come from: their widths, and how tensor parallelism cuts them.

A row-parallel layer (o_proj, down_proj) has its K divided over the ranks and ends in a reduction; a column-parallel
one (the fused q, k and v; the fused gate and up) has its N divided and begins with a gather, or ends in one.
"""

from dataclasses import dataclass

from iris_tp.bench.rows import part


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    attention: int  # query heads x head size: what o_proj multiplies
    kv: int  # key heads x head size; 0: only o_proj is of interest
    mlp: int = 0
    vocab: int = 0

    @property
    def qkv(self) -> int:
        return self.attention + 2 * self.kv

    def row_linears(self, world: int) -> list[tuple[int, int]]:
        """Return (N, K) of one rank."""
        return [(self.hidden, part(k, world)) for k in (self.attention, self.mlp) if k]

    def column_linears(self, world: int) -> list[tuple[int, int]]:
        """Return (N, K) of one rank."""
        return [(part(n, world), self.hidden) for n in (self.qkv, 2 * self.mlp)] if self.kv else []


LLAMA_8B = Model("Llama-3-8B", 4096, 4096, 1024, 14336, 128256)
LLAMA_70B = Model("Llama-3-70B", 8192, 8192, 1024, 28672, 128256)
LLAMA_405B = Model("Llama-3-405B", 16384, 16384, 1024, 53248, 128256)
QWEN3_32B = Model("Qwen3-32B", 5120, 8192, 1024, 25600, 151936)
QWEN2_72B = Model("Qwen2-72B", 8192, 8192, 1024, 29568, 152064)  # 29568 over 4 is no multiple of 64
DEEPSEEK_V3 = Model("DeepSeek-V3", 7168, 16384, 0)

PREFILL = (LLAMA_8B, LLAMA_70B, LLAMA_405B, QWEN3_32B, QWEN2_72B, DEEPSEEK_V3)
DECODE = (LLAMA_8B, LLAMA_70B, QWEN3_32B, QWEN2_72B, DEEPSEEK_V3)
