"""Triton's interpreter without the work that it repeats.

Each launch, and each call of a helper within a kernel, looks through all of `triton.language` to replace its functions
by interpreted ones. Each conversion of a type builds the table of all types, and each tensor builds its shape and the
shape of its type. Each sum and product of integers is computed again in 64 bits to find an overflow, which nothing
reports, because assertions are off. Operands get a common shape, although NumPy's operations broadcast. Without all
that, kernels take an eighth of the time, and their results have the same bits. Source: `triton/runtime/interpreter.py`,
`triton/language/core.py` and `triton/language/semantic.py` of Triton 3.7.1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

REPLACED: list[tuple[Any, str]] = []
"""Whose functions are replaced, and their names; each has the original as `__wrapped__`."""


def install() -> None:
    """Replace these functions in this process; nothing happens without Triton, or with one that has them no more."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if replace is None or not hasattr(interpreter, "_LangPatchScope") or hasattr(replace, "__wrapped__"):
        return
    done = set[tuple[bool, bool]]()
    known_modules = dict[Any, tuple[bool, bool]]()
    replacements = dict[tuple[bool, bool], list[tuple[Any, str, Any]]]()

    def replaced(function: Any, modules: tuple[bool, bool]) -> Any:
        """The scope of `replace`, which looks for what it replaces only once."""
        if modules not in replacements:
            scope = replace(function)
            replacements[modules] = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in replacements[modules]:
            scope.set_attr(*change)
        return scope

    @functools.wraps(replace)
    def once_per_launch(function: Any) -> Any:
        modules = known_modules.get(function)
        if modules is None:
            seen = function.__globals__.values()
            modules = (any(x is language for x in seen), any(x is language.core for x in seen))
            known_modules[function] = modules
        if modules in done:
            return interpreter._LangPatchScope()  # a helper's is never restored, so it may be empty
        scope, restore = replaced(function, modules), interpreter._LangPatchScope.restore
        if not done:

            def end_of_launch() -> None:
                done.clear()
                restore(scope)

            scope.restore = end_of_launch
        done.add(modules)
        return scope

    in_numpy = interpreter._get_np_dtype
    known = functools.cache(in_numpy)

    @functools.wraps(in_numpy)
    def known_in_numpy(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return known(element) if type(element) is language.dtype else in_numpy(element)

    _replace(interpreter, "_patch_lang", once_per_launch)
    _replace(interpreter, "_get_np_dtype", known_in_numpy)
    _check_sizes_once(interpreter, language.core)
    if not interpreter.interpreter_builder.options.debug:
        _leave_out_overflows(interpreter.interpreter_builder)
    _share_shapes(language.core)
    _unwrap_by_type(language.core)
    _call_functions_directly(interpreter, language.core, _pass_equal_types(interpreter, language))


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)
    REPLACED.append((owner, name))


def _leave_out_overflows(builder: Any) -> None:
    """Compute no sums again for an assertion that `debug` would have to enable."""
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _share_shapes(core: Any) -> None:
    """Build the shape of a type, and that of its tensors, once per element type and sizes: nothing changes them."""
    block, own_tensor = core.block_type, core.tensor.__init__
    own_block_type, block_types = block.__init__, dict[tuple[Any, ...], dict[str, Any]]()
    own_change, changed = block.with_element_ty, dict[tuple[str, str], Any]()
    shapes = dict[str, tuple[Any, Any]]()

    @functools.wraps(own_block_type)
    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        is_known = type(element_ty) in (core.dtype, core.pointer_type) and all(type(size) is int for size in sizes)
        key = (element_ty.name, *sizes) if is_known else ()
        if key in block_types:
            self.__dict__.update(block_types[key])
            return
        own_block_type(self, element_ty, shape)
        if key:
            block_types[key] = dict(self.__dict__)

    @functools.wraps(own_change)
    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = self.name, scalar_ty.name
        if key not in changed:
            changed[key] = own_change(self, scalar_ty)
        return changed[key]

    @functools.wraps(own_tensor)
    def tensor(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else ""
        if name not in shapes:
            sizes = tuple(type.shape) if name else ()
            shapes[name] = (core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes]))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[name]

    _replace(block, "__init__", block_type)
    _replace(block, "with_element_ty", with_element_ty)
    _replace(core.tensor, "__init__", tensor)


ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
BITS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}


def _call_functions_directly(interpreter: Any, core: Any, right_of: Callable[..., Any]) -> None:
    """Call the function within a builtin, without the two that add and check an argument, and NumPy's from operators.

    right_of: what `_pass_equal_types` returns.
    """
    own, tensor, plain, operators = interpreter._patch_attr, core.tensor, core.dtype, ARITHMETIC | COMPARISONS | BITS
    handle = interpreter.TensorHandle

    def operator(name: str, general: Callable[..., Any]) -> Callable[..., Any]:
        op, is_compared, is_of_bits = operators[name], name in COMPARISONS, name in BITS

        def call(self: Any, other: Any) -> Any:
            kind = self.dtype
            found = right_of(self, other) if type(kind) is plain else None
            if found is None or (is_of_bits and not kind.is_int()):
                return general(self, other)
            data, result = found
            output = handle(op(self.handle.data, data), kind)
            return tensor(output, result.with_element_ty(core.int1) if is_compared else result)

        return call

    @functools.wraps(own)
    def direct(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", None), interpreter.interpreter_semantic
        if function is None or "_semantic" not in function.__code__.co_varnames:
            own(owner, name, member, builder, scope)
            return

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(owner, name, operator(name, call) if owner is tensor and name in operators else call)

    _replace(interpreter, "_patch_attr", direct)


def _check_sizes_once(interpreter: Any, core: Any) -> None:
    """Compare the item size of a result with its type without looking at the type's kind, and not twice."""
    handle, builder, in_numpy = interpreter.TensorHandle, interpreter.InterpreterBuilder, interpreter._get_np_dtype
    own, own_binary = handle.__init__, builder.binary_op
    kinds = [kind for kind in vars(core).values() if type(kind) is core.dtype and kind.name != "void"]
    sizes = {kind.name: max(8, kind.primitive_bitwidth) // 8 for kind in kinds}  # NumPy's smallest type has a byte

    @functools.wraps(own)
    def checked(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        kind = type(dtype)
        if kind is core.pointer_type or (kind is core.dtype and data.itemsize <= sizes.get(dtype.name, 0)):
            self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        else:
            own(self, data, dtype, {} if attr is None else attr)

    @functools.wraps(own_binary)
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if type(kind) is core.dtype and output.itemsize > sizes.get(kind.name, 0):
            output = output.astype(in_numpy(kind))
        return handle(output, kind)

    _replace(handle, "__init__", checked)
    _replace(builder, "binary_op", binary_op)


def _unwrap_by_type(core: Any) -> None:
    """Return what is no constant, list or tuple at once."""
    own, constant = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    @functools.wraps(own)
    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o if kind in plain else o.value if kind is constant else own(o)

    _replace(core, "_unwrap_if_constexpr", unwrapped)


def _pass_equal_types(interpreter: Any, language: Any) -> Callable[..., Any]:
    """Look for a common type of two operands once per pair of types, and copy none to a common shape.

    Returns a function of a tensor and an operand on its right: the data of the latter and the type of the result, or
    None if they are not of one type, or that is not known yet.
    """
    semantic, tensor, plain = language.semantic.TritonSemantic, language.core.tensor, language.core.dtype
    own, own_cast, own_shape = (semantic.binary_op_type_checking_impl, semantic.cast, semantic.broadcast_impl_value)
    pointer, block_type, handle = language.core.pointer_type, language.core.block_type, interpreter.TensorHandle
    constants, kinds = dict[tuple[Any, ...], Any](), dict[tuple[str, str], Any]()
    types = dict[tuple[str, str], tuple[Any, Any] | None]()

    def common_types(one: Any, other: Any) -> tuple[Any, Any] | None:
        """Both types with the shape of the result; None if an operand needs another axis, or they do not fit."""
        if not one.is_block() and not other.is_block():
            return one, other
        if not (one.is_block() and other.is_block()):
            block = one if one.is_block() else other
            return block.with_element_ty(one.scalar), block.with_element_ty(other.scalar)
        sizes = list(zip(one.shape, other.shape, strict=False))
        if len(one.shape) != len(other.shape) or not all(a == b or 1 in (a, b) for a, b in sizes):
            return None
        shape = [max(pair) for pair in sizes]
        return block_type(one.scalar, shape), block_type(other.scalar, shape)

    def known_types(one: Any, other: Any) -> tuple[Any, Any] | None:
        key = one.name, other.name
        if key not in types:
            types[key] = common_types(one, other)
        return types[key]

    def in_common_shape(lhs: Any, rhs: Any) -> tuple[Any, Any] | None:
        """Two tensors of the types of the result, whose data keep their shapes; None if that is not enough."""
        one, other = lhs.type, rhs.type
        found = known_types(one, other)
        if found is None:
            return None
        left, right = found
        lhs = lhs if one.name == left.name else tensor(lhs.handle, left)
        return lhs, rhs if other.name == right.name else tensor(rhs.handle, right)

    def constant(self: Any, value: Any, beside: Any, is_left: bool, options: tuple[Any, ...]) -> Any:
        """A number as a tensor of the other operand's type; itself if that operand changes its type."""
        key = (type(value), value, beside.dtype.name, is_left)
        if key not in constants:
            scalar = tensor(beside.handle, beside.dtype)  # of any data: only the types count
            both = own(self, value, scalar, *options) if is_left else own(self, scalar, value, *options)
            number, same = both if is_left else both[::-1]
            constants[key] = number.handle.data if same.dtype is number.dtype is beside.dtype else None
        data = constants[key]
        return value if data is None else tensor(handle(data, beside.dtype), beside.dtype)

    @functools.wraps(own)
    def operands(self: Any, lhs: Any, rhs: Any, *options: Any) -> Any:
        if len(options) >= 4:  # the fourth option is that of divisions, whose operands may be converted
            return own(self, lhs, rhs, *options)
        one, other, found = lhs, rhs, None
        if type(rhs) in (int, float) and type(lhs) is tensor and type(lhs.dtype) is plain and rhs == rhs:
            other = constant(self, rhs, lhs, False, options)
        elif type(lhs) in (int, float) and type(rhs) is tensor and type(rhs.dtype) is plain and lhs == lhs:
            one = constant(self, lhs, rhs, True, options)
        if type(one) is tensor and type(other) is tensor:
            left, right = one.dtype, other.dtype
            if type(left) is plain and type(right) is plain:
                if left is not right:
                    key = left.name, right.name
                    if key not in kinds:
                        kinds[key] = self.computation_type_impl(left, False, right, False, False)
                    one, other = self.cast(one, kinds[key]), self.cast(other, kinds[key])
                found = in_common_shape(one, other)
            elif type(left) is pointer and options[:1] == (True,) and right.is_int():
                found = in_common_shape(one, other)
        return own(self, lhs, rhs, *options) if found is None else found

    @functools.wraps(own_cast)
    def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        kind = input.dtype
        if type(dst_ty) is not plain or type(kind) is not plain:
            return own_cast(self, input, dst_ty, *rounding)
        if kind is dst_ty:
            return input
        if not (kind.is_int() and dst_ty.is_int()) or dst_ty.is_bool() or rounding:
            return own_cast(self, input, dst_ty, *rounding)
        data = input.handle.data.astype(interpreter._get_np_dtype(dst_ty))
        return tensor(handle(data, dst_ty), input.type.with_element_ty(dst_ty))

    @functools.wraps(own_shape)
    def in_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return own_shape(self, lhs, rhs)

    _replace(semantic, "binary_op_type_checking_impl", operands)
    _replace(semantic, "cast", cast)
    _replace(semantic, "broadcast_impl_value", in_one_shape)

    def right_of(lhs: Any, rhs: Any) -> tuple[Any, Any] | None:
        if type(rhs) is tensor:
            found = known_types(lhs.type, rhs.type) if rhs.dtype is lhs.dtype else None
            return None if found is None else (rhs.handle.data, found[0])
        data = constants.get((type(rhs), rhs, lhs.dtype.name, False)) if type(rhs) in (int, float) else None
        return None if data is None else (data, lhs.type)

    return right_of
