"""Apply torch.autocast to operands of products that torch does not see, as `torch.nn.functional.linear` does.

Inside `with torch.autocast(device_type, dtype)` a linear multiplies in `dtype`: torch converts input, weight and bias,
whatever floating-point dtype they have, but for float64. A frozen weight is converted in each call, here as there:
torch's cache of converted weights is for those that require grad.
"""

from __future__ import annotations

import torch


def autocast_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype that a tensor of `dtype` gets under the autocast that is enabled for `device_type`."""
    exempt = dtype == torch.float64 or not dtype.is_floating_point
    return dtype if exempt else torch.get_autocast_dtype(device_type)


def autocast(x: torch.Tensor, device_type: str) -> torch.Tensor:
    """Convert `x` as the autocast that is enabled for `device_type` does."""
    dtype = autocast_dtype(x.dtype, device_type)
    return x if x.dtype == dtype else x.to(dtype)


def current_autocast(device_type: str) -> torch.dtype | None:
    """Return the dtype of the autocast that is enabled for `device_type`, if one is."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
