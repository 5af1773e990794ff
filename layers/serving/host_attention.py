"""Attention on the host, row by row: the same bits whatever the batch, its padding and the cache's length.

torch's attention for CPUs chooses blocks by the number of queries. This is for a promise of equal bits on machines
without a GPU: its order is fixed, it is not fast. Keys count from the first that a row sees, in blocks of 64.
"""

from __future__ import annotations

from iris import fixed_order
from iris_ops.operators import OPERATORS
import numpy as np
import torch

_KEYS = 64


def host_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [B, T, H, V] of queries q [B, H, T, D], k [B, KV, L, D], v [B, KV, L, V], where mask [B, 1, T, L] is true.

    Without a mask token t sees the first t + 1 keys. A token that sees nothing gets zeros.
    """
    batch, heads, tokens, dim = q.shape
    groups = heads // k.shape[1]
    queries, keys, values = (each.detach().float().numpy() for each in (q, k, v))
    width = v.shape[3]  # latent attention has other values than keys
    out = np.zeros((batch, heads, tokens, width), np.float32)
    causal = np.tri(tokens, k.shape[2], dtype=bool)
    for b in range(batch):
        seen = causal if mask is None else mask[b, 0].numpy()
        columns = np.flatnonzero(seen.any(0))
        if not columns.size:
            continue
        first, end = columns[0], columns[-1] + 1
        shown = np.tile(seen[:, first:end], (groups, 1))
        for head in range(k.shape[1]):
            own = slice(head * groups, (head + 1) * groups)
            rows = queries[b, own].reshape(groups * tokens, dim)
            attended = _attend(rows, keys[b, head, first:end], values[b, head, first:end], shown, scale)
            out[b, own] = attended.reshape(groups, tokens, width)
    return torch.from_numpy(out).to(q.dtype).transpose(1, 2).contiguous()


def _attend(rows: np.ndarray, keys: np.ndarray, values: np.ndarray, shown: np.ndarray, scale: float) -> np.ndarray:
    scores = fixed_order.product(rows, keys.T) * np.float32(scale)
    scores = np.where(shown, scores, np.float32(-np.inf))
    top = scores.max(1, keepdims=True)
    chances = np.exp(scores - np.where(np.isfinite(top), top, np.float32(0)), dtype=np.float32)
    total = np.zeros((len(rows), 1), np.float32)
    sums = np.zeros((len(rows), values.shape[1]), np.float32)
    for begin in range(0, keys.shape[0], _KEYS):
        block = np.zeros((len(rows), _KEYS), np.float32)
        known = np.zeros((_KEYS, values.shape[1]), np.float32)
        width = min(_KEYS, keys.shape[0] - begin)
        block[:, :width], known[:width] = chances[:, begin : begin + width], values[begin : begin + width]
        total += block.sum(1, keepdims=True)
        sums += fixed_order.product(block, known)
    return sums / np.where(total == 0, np.float32(1), total)


# Compilers cannot trace numpy.
OPERATORS.add(
    "host_attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? mask=None) -> Tensor",
    host_attention,
    lambda q, k, v, *_: q.new_empty(*q.transpose(1, 2).shape[:3], v.shape[3]),
    exact_strides=False,
)
