"""Every exception that the library raises for a user.

Each derives from `IrisError` and from the built-in exception that Python users would catch for the same mistake. If
torch raises `RuntimeError` for such a mistake, the class derives from that too. A message names the argument, its value
and the expected value, and a remedy if one exists.
"""


class IrisError(Exception):
    """Base of all errors raised by `iris`, `iris_ops` and `layers`."""


class ArgumentError(IrisError, ValueError):
    """An argument has a wrong value: size, rank, range, layout, overlap."""


class ShapeError(ArgumentError, RuntimeError):
    """A tensor has the wrong number of dimensions or the wrong sizes."""


class ConstructorError(ArgumentError, RuntimeError):
    """A constructor of tensors on the heap got arguments that torch's own refuses."""


class DtypeError(IrisError, TypeError, RuntimeError):
    """A tensor's dtype is not supported, or two dtypes that must agree do not."""


class DeviceError(ArgumentError, RuntimeError):
    """A tensor lies on another device than the context."""


class ExpertError(IrisError, IndexError):
    """A token was routed to an expert that does not exist: its index is out of range."""


class NotSymmetricError(ArgumentError, RuntimeError):
    """A tensor must lie on this context's symmetric heap and does not."""


class HeapExhausted(IrisError, MemoryError):
    """The symmetric heap has no room for an allocation."""


class ClosedError(IrisError, RuntimeError):
    """The context was used after `close()`."""


class ThreadError(IrisError, RuntimeError):
    """A thread used a context that belongs to another thread."""


class PeerLostError(IrisError, RuntimeError):
    """A wait on another rank failed: the process ended, or did not signal in time."""


class PlatformError(IrisError, RuntimeError):
    """This machine or this process is set up such that it cannot run the library."""


class VersionError(PlatformError, ImportError):
    """The versions of this library, torch and triton do not go together, in a process or among ranks."""


class CaptureError(IrisError, RuntimeError):
    """A call that cannot be part of a CUDA graph was made while one is captured."""


class CheckpointError(IrisError, ValueError):
    """A checkpoint lacks a tensor, has one of the wrong shape, or cannot be read."""


class StyleError(IrisError, ValueError):
    """A tensor-parallel plan names a style or a module that is not supported."""
