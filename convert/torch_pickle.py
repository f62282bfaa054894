"""The pickle in a PyTorch file, read by a small machine of its own that can build tensor headers and nothing else.

Python's unpickler runs whatever a pickle names. Here nothing is imported and nothing is called: of the pickle's
operations only those that a dictionary of tensors needs are known, and a name it refers to is only a name. Where a
training framework pickled more than that beside its tensors, `read_inert` keeps what would have been made as a record
of what was to be called, with what; nothing is called either.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
"""PyTorch's typed storages → safetensors' dtypes."""
TORCH_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"} | {
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
"""Dtypes that have no typed storage."""


@dataclass(frozen=True)
class Global:
    """A name that the pickle refers to."""

    module: str
    name: str


@dataclass(frozen=True)
class Storage:
    """A run of elements in a record of the file."""

    key: str
    """The record: `data/KEY`."""
    dtype: str | None
    """None: untyped; the tensor says it."""
    size: int
    """Elements; bytes if untyped."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor's header: sizes, and strides and offset in elements of its storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class Opaque:
    """Something that the pickle would have made, which is not made."""

    maker: Any
    """The class, or what was to be called: a Global as a rule."""
    arguments: Any
    state: Any = None
    """What it was to be given afterwards: its attributes, as a rule."""


def read_pickle(data: bytes) -> Any:
    """What the pickle holds: dicts, lists, tuples, strings, numbers and PickledTensor.

    Raises ValueError for anything that a dictionary of tensors does not need, naming it, and if the data is damaged.
    """
    return _run(data, _OPERATIONS)


def read_inert(data: bytes) -> Any:
    """The same, with an Opaque or a Global for anything else; what a dict has under other keys than strings and
    integers is left out. Raises ValueError if the data is damaged.
    """
    return _run(data, _INERT)


def _run(data: bytes, operations: dict[str, Callable[..., None]]) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (result,) = stack
                return result
            if opcode.name not in operations:
                raise ValueError(f"it uses the operation {opcode.name}")
            operations[opcode.name](argument, stack, marks, memo)
    except (IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its pickle is damaged") from error
    raise ValueError("its pickle has no end")


def _literal(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    stack.append(argument)


def _constant(make: Callable[[], Any]) -> Any:
    return lambda argument, stack, marks, memo: stack.append(make())


def _tuple_of(count: int) -> Any:
    def run(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
        items = tuple(_pop(stack) for _ in range(count))
        stack.append(items[::-1])

    return run


def _pop(stack: list[Any]) -> Any:
    return stack.pop()


def _since_mark(stack: list[Any], marks: list[int]) -> list[Any]:
    start = marks.pop()
    items = stack[start:]
    del stack[start:]
    return items


def _tuple(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    stack.append(tuple(_since_mark(stack, marks)))


def _mark(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    marks.append(len(stack))


def _append(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    item = stack.pop()
    _of(list, stack[-1]).append(item)


def _appends(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    items = _since_mark(stack, marks)
    _of(list, stack[-1]).extend(items)


def _set_item(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    value, key = stack.pop(), stack.pop()
    _set(_of(dict, stack[-1]), key, value)


def _set_items(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    items = _since_mark(stack, marks)
    for key, value in zip(items[::2], items[1::2], strict=True):
        _set(_of(dict, stack[-1]), key, value)


def _set(target: dict[Any, Any], key: Any, value: Any) -> None:
    if not isinstance(key, str | int):  # not hashed before it is known: a tuple of tuples can take forever
        raise ValueError(f"it has {_shown(key)} for a key")
    if key in target:
        raise ValueError(f"it holds {key!r} twice")
    target[key] = value


def _put(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    memo[argument] = stack[-1]


def _memoize(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    memo[len(memo)] = stack[-1]


def _get(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    stack.append(memo[argument])


def _global(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    stack.append(_known(*argument.split(" ", 1)))


def _stack_global(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    name, module = _of(str, stack.pop()), _of(str, stack.pop())
    stack.append(_known(module, name))


def _build(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    """The attributes of an ordered dict (`_metadata`: versions of modules), which carry no tensor."""
    stack.pop()
    _of(dict, stack[-1])


def _storage(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    kind, type_, key, _, size = stack.pop()
    if kind != "storage" or not isinstance(type_, Global) or not isinstance(key, str):
        raise ValueError("it refers to something outside that is no storage")
    stack.append(Storage(key, STORAGES.get(type_.name), _count(size)))


def _reduce(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    arguments, function = _of(tuple, stack.pop()), stack.pop()
    if not isinstance(function, Global) or (function.module, function.name) not in _FUNCTIONS:
        raise ValueError(f"it calls {_shown(function)}")
    stack.append(_FUNCTIONS[function.module, function.name](*arguments))


def _known(module: str, name: str) -> Global:
    storage = module in ("torch", "torch.storage") and (name in STORAGES or name == "UntypedStorage")
    dtype = module == "torch" and name in TORCH_DTYPES
    if not storage and not dtype and (module, name) not in _FUNCTIONS:
        raise ValueError(f"it refers to {module}.{name}")
    return Global(module, name)


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in items:
        _set(result, key, value)
    return result


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any = None, metadata: Any = None
) -> PickledTensor:
    """`_rebuild_tensor_v2`, whose seventh argument is a dict, if there is one, and `_v3`, where it is the dtype."""
    name = TORCH_DTYPES[dtype.name] if isinstance(dtype, Global) else _of(Storage, storage).dtype
    if name is None:
        raise ValueError("it has a tensor of no dtype")
    sizes, steps = tuple(map(_count, _of(tuple, shape))), tuple(map(_count, _of(tuple, strides)))
    if len(sizes) != len(steps):
        raise ValueError(f"it has a tensor of {len(sizes)} dimensions and {len(steps)} strides")
    return PickledTensor(_of(Storage, storage), name, _count(offset), sizes, steps)


def _parameter(data: Any, grad: Any, hooks: Any) -> PickledTensor:
    return _of(PickledTensor, data)


def _count(value: Any) -> int:
    if _of(int, value) < 0:
        raise ValueError(f"it has {value} for a size, a stride or an offset")
    return int(value)


def _of[T](kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"it has {_shown(value)} in the place of a {kind.__name__}")
    return value


def _shown(value: Any) -> str:
    return f"{value.module}.{value.name}" if isinstance(value, Global) else f"a {type(value).__name__}"


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}

_OPERATIONS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda argument, stack, marks, memo: None),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"), _literal),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"), _literal),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    **{f"TUPLE{count}": _tuple_of(count) for count in (1, 2, 3)},
    "TUPLE": _tuple,
    "MARK": _mark,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "BINPERSID": _storage,
    "BUILD": _build,
    "REDUCE": _reduce,
}
"""Name of an operation, as in `pickletools` → what it does to (argument, stack, marks, memo)."""


def _inert_global(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    stack.append(Global(*argument.split(" ", 1)))


def _inert_stack_global(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    name, module = _of(str, stack.pop()), _of(str, stack.pop())
    stack.append(Global(module, name))


def _inert_reduce(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    """Also of NEWOBJ, whose function is a class. A tensor that is not read (a complex one) is opaque, too."""
    arguments, function = stack.pop(), stack.pop()
    known = _FUNCTIONS.get((function.module, function.name)) if isinstance(function, Global) else None
    try:
        stack.append(Opaque(function, arguments) if known is None else known(*_of(tuple, arguments)))
    except ValueError:
        stack.append(Opaque(function, arguments))


def _inert_build(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    state = stack.pop()
    if isinstance(stack[-1], Opaque):
        stack[-1].state = state


def _inert_set_items(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    items = _since_mark(stack, marks)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(stack[-1], dict) and isinstance(key, str | int):
            _set(stack[-1], key, value)


def _inert_set_item(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    marks.append(len(stack) - 2)
    _inert_set_items(argument, stack, marks, memo)


def _inert_appends(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    items = _since_mark(stack, marks)
    if isinstance(stack[-1], list):
        stack[-1].extend(items)


def _inert_append(argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    marks.append(len(stack) - 1)
    _inert_appends(argument, stack, marks, memo)


_INERT = {
    **_OPERATIONS,
    **dict.fromkeys(
        ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINSTRING", "SHORT_BINSTRING"), _literal
    ),
    "GLOBAL": _inert_global,
    "STACK_GLOBAL": _inert_stack_global,
    "REDUCE": _inert_reduce,
    "NEWOBJ": _inert_reduce,
    "BUILD": _inert_build,
    "SETITEM": _inert_set_item,
    "SETITEMS": _inert_set_items,
    "APPEND": _inert_append,
    "APPENDS": _inert_appends,
    "EMPTY_SET": _constant(list),
    "ADDITEMS": _inert_appends,
    "POP": lambda argument, stack, marks, memo: stack.pop(),
    "POP_MARK": lambda argument, stack, marks, memo: _since_mark(stack, marks),
}
