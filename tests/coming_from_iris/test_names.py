"""The library has each name of ROCm/iris that `docs/guides/coming-from-iris.md` documents, with its arguments."""

from dataclasses import dataclass
import importlib
import inspect
from pathlib import Path
import re
from typing import Any
import warnings

import iris
from iris import aliases, errors
from iris.ccl import Config
from iris.ccl.collectives import Collectives
from iris.device.tracing import DeviceTracing
from iris.tracing import Tracing
from iris_ops import FusedConfig
from iris_ops.ops import Ops
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from-iris.md"
HERE = r"same|alias: `[\w.]+`|different: .+|not provided"
ROW = re.compile(rf"^\| `([\w.]+)(?:\(([^)]*)\))?` \| ({HERE}) \|$", re.MULTILINE)
ROWS = [(name, given, here) for name, given, here in ROW.findall(PAGE.read_text())]
ROOTS = {
    "ctx.ccl.": Collectives,
    "ctx.ops.": Ops,
    "ctx.tracing.": Tracing,
    "ctx.": iris.Iris,
    "DeviceContext.": iris.DeviceContext,
    "DeviceTracing.": DeviceTracing,
}
# What `*size` and torch's keywords of a constructor are; the programs of this folder pass them.
CONSTRUCTORS = {"zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "zeros_like"}
MISSING = object()


def _value(name: str) -> Any:
    for prefix, root in ROOTS.items():
        if name.startswith(prefix):
            return inspect.getattr_static(root, name.removeprefix(prefix), MISSING)
    value: Any = iris
    for part in name.split(".")[1:]:
        try:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(f"iris.{part}")
        except (AttributeError, ImportError):
            return MISSING
    return value


def _parameters(value: Any) -> set[str]:
    value = value.__func__ if isinstance(value, staticmethod) else value
    function = getattr(value, "fn", value)  # of a kernel's function
    return {*inspect.signature(function).parameters, *getattr(value, "aliases", ())}


def test_the_page_has_rows_of_every_part():
    names = [name for name, _, _ in ROWS]
    assert len(names) == len(set(names)) > 120
    assert all(any(name.startswith(prefix) for name in names) for prefix in ROOTS)
    table_rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert len(table_rows) == len(ROWS), "a row that says none of the four"


def _check(name: str, given: str, here: str) -> None:
    """Raises where the library has a name that the page calls not provided, lacks another, or has other parameters."""
    actual = _value(name)
    owner, _, field = name.rpartition(".")
    config = {"iris.ccl.Config": Config, "iris.ops.FusedConfig": FusedConfig}.get(owner)
    if here == "not provided":
        assert actual is MISSING
        if config is not None:
            assert field in config.unused
        elif owner == "iris":
            with pytest.raises(AttributeError, match="expected .* here .docs/guides/coming-from-iris.md"):
                getattr(iris, field)
        return
    assert actual is not MISSING
    if config is not None and not given:
        own = config.aliases.get(field, field)
        assert own in config.__dataclass_fields__
        assert here.startswith("alias") == (own != field)
        return
    if owner == "ctx" and field in CONSTRUCTORS:
        return
    if given:
        assert set(given.split(", ")) <= _parameters(actual)


@pytest.mark.parametrize("name, given, here", ROWS, ids=[name for name, _, _ in ROWS])
def test_a_name_is_what_the_page_says(name, given, here):
    _check(name, given, here)


def test_exported_names_are_on_the_page():
    """Each name that `iris` exports is on the page, or ROCm/iris does not have it."""
    new = {"IrisError", "__version__", "tiles"}
    assert {f"iris.{name}" for name in iris.__all__} - {name for name, _, _ in ROWS} == {f"iris.{name}" for name in new}


def test_a_field_of_amds_own_is_told_once():
    @aliases.fields({}, {"num_xcds": "none are here", "chunk_size": "none are here"})
    @dataclass(frozen=True)
    class Fresh:
        size: int = 1

    with pytest.warns(
        UserWarning, match="Fresh.num_xcds has no use here: none are here .docs/guides/coming"
    ) as reported:
        assert [Fresh(num_xcds=8), Fresh(num_xcds=8, chunk_size=2, size=2), Fresh(num_xcds=None)] == [
            Fresh(), Fresh(2), Fresh(1)
        ]  # fmt: skip
    assert len(reported) == 1


def test_both_names_of_a_field_at_once_are_refused():
    with pytest.raises(ValueError, match="block_size_m and block_m"):
        FusedConfig(block_m=64, block_size_m=64)
    assert FusedConfig(block_size_m=64, num_sms=7) == FusedConfig(block_m=64, num_programs=7)
    assert FusedConfig(block_size_m=64).block_size_m == 64


def test_errors_of_tensors_are_runtime_errors_too():
    for kind in (errors.ShapeError, errors.DtypeError, errors.DeviceError, errors.NotSymmetricError):
        assert issubclass(kind, RuntimeError) and issubclass(kind, errors.IrisError)


@pytest.mark.parametrize(
    "field, value",
    [
        ("all_gather_variant", "partitioned"), ("all_to_all_variant", "default"), ("num_warps", 8), ("num_stages", 1),
        ("threads_per_warp", 64), ("waves_per_eu", 0), ("num_xcds", 8), ("use_gluon", False),
    ],
)  # fmt: skip
def test_a_field_of_amds_own_is_taken_and_kept(field, value):
    """Ports launch kernels of their own with such a field; it makes no difference to a collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = Config(block_size_m=32, **{field: value})
        assert getattr(config, field) == value
        assert config == Config(block_size_m=32) and hash(config) == hash(Config(block_size_m=32))
        config.swizzle_size = 8
        assert getattr(config, field) == value and config.swizzle_size == 8
    assert getattr(Config(), field) is None
    with pytest.raises(AttributeError, match="nothing"):
        _ = config.nothing


@pytest.mark.parametrize(
    "field, value, world_size, message",
    [
        ("all_reduce_variant", "three_shot", None, "all_reduce_variant is 'three_shot'"),
        ("all_reduce_variant", "ring", 3, "block_n is 128 with the variant 'ring' and 3 ranks"),
        ("num_xcds", 0, None, "num_xcds is 0"),
        ("chunk_size", -1, 2, "chunk_size is -1"),
        ("all_reduce_num_rings", 0, 2, "all_reduce_num_rings is 0"),
        ("num_sms", 8, 0, "world_size is 0"),
    ],
)
def test_validate_validates(field, value, world_size, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = FusedConfig(**{field: value})
    with pytest.raises(ValueError, match=message):
        config.validate(world_size)
