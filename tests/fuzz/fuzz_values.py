"""Values for `fuzz_inputs`: tensors of every class, dtype, device and stride that Python can make, and things that are
wrong.

Nothing here takes memory: what is large is a view of one element, or on the meta device.
"""

from __future__ import annotations

import fractions
import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import undivided
from undivided import masks

FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
EVERY_DTYPE = tuple(
    dict.fromkeys(
        value
        for name in dir(torch)
        if isinstance(value := getattr(torch, name), torch.dtype)
        and not name.startswith(("q", "bits", "uint1", "int1"))
        and value.itemsize
    )
)
LENGTHS = (0, 1, 2, 3, 5, 8, 17, 33)
HUGE = (2**31 - 1, 2**31, 2**40)
FAKE = FakeTensorMode()


class FunctionOnly(Tensor):
    """A class with ``__torch_function__`` alone: its memory is plain."""


def tensor(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Filled with 0 to 3, whatever the dtype."""
    if device == "meta":
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    count = 1
    for size in shape:
        count *= size
    if count > 1 << 20:
        return one(dtype).expand(tuple(shape))
    return (torch.arange(count, dtype=torch.int64) % 4).to(torch.float32).to(dtype).reshape(tuple(shape))


def one(dtype: torch.dtype) -> Tensor:
    return torch.ones((), dtype=torch.float32).to(dtype)


def _shortened(to: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    def shorten(x: Tensor) -> Tensor:
        x = x.clone()
        x.untyped_storage().resize_(to(x.untyped_storage().nbytes()))
        return x

    return shorten


def _wide(x: Tensor) -> Tensor:
    """The same view of a storage that holds only its beginning."""
    x = torch.cat([x.flatten(), x.flatten()])[x.numel() :].reshape(x.shape)
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def _functional(x: Tensor) -> Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(x)


def _escaped(transform: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def escape(x: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def sum_of(y: Tensor) -> Tensor:
            kept.append(y)
            return y.sum()

        transform(sum_of)(x)
        return kept[0]

    return escape


def _two(x: Tensor) -> Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x)


def _logging(x: Tensor) -> Tensor:
    from torch.testing._internal.logging_tensor import LoggingTensor

    return LoggingTensor(x)


def _collective(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(x)


@functools.cache
def _mesh() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,))


def _distributed(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, _mesh(), [Replicate()], run_check=False)


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


STRIDES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: x.mT,
    _gaps,
    lambda x: torch.cat([x, x])[x.shape[0] :],
    lambda x: x[:1].expand(x.shape),
    lambda x: x.as_strided(x.shape, [1] * x.dim()),
    lambda x: x.as_strided(x.shape, [0] * x.dim()),
    lambda x: x.flip(0),
    lambda x: x.unsqueeze(0),
    lambda x: x.squeeze(),
    lambda x: x[..., :0],
    lambda x: x[:0],
    lambda x: x.flatten(),
    lambda x: x.reshape(-1)[0],
)
KINDS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.to("meta"),
    FAKE.from_tensor,
    lambda x: x.as_subclass(FunctionOnly),
    lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    lambda x: x.detach().clone().requires_grad_(),
    torch._neg_view,
    lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    lambda x: torch.complex(x.float(), x.float()).conj(),
    lambda x: torch.complex(x.float(), x.float()).conj().imag,
    _shortened(lambda n: 0),
    _shortened(lambda n: n // 2),
    _wide,
    Tensor.to_sparse,
    lambda x: x.to_sparse_csr(),
    Tensor.to_mkldnn,
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: torch.nested.nested_tensor(list(x)),
    lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    lambda x: torch.masked.masked_tensor(x, torch.ones(x.shape, dtype=torch.bool)),
    _two,
    _logging,
    _collective,
    _distributed,
    _functional,
    torch._to_functional_tensor,
    _escaped(torch.func.vmap),
    _escaped(torch.func.grad),
    _inference,
    lambda x: torch.nn.parameter.UninitializedParameter(),
    lambda x: torch.nn.parameter.UninitializedBuffer(),
)


def wild_tensor(rng: random.Random, like: Tensor) -> Tensor:
    """A tensor that is like this one but for one or two things."""
    found = like
    for _ in range(rng.choice((1, 1, 1, 2))):
        turn = rng.random()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if turn < 0.15:
                    found = found.to(rng.choice(EVERY_DTYPE))
                elif turn < 0.35:
                    found = rng.choice(STRIDES)(found)
                elif turn < 0.45:
                    found = tensor([rng.choice(LENGTHS) for _ in range(rng.randrange(6))], found.dtype)
                elif turn < 0.52:
                    found = _huge(rng, found)
                else:
                    return rng.choice(KINDS)(found)  # PyTorch itself may read what is no memory
            except Exception:  # PyTorch has no such tensor
                return found
    return found


def _huge(rng: random.Random, like: Tensor) -> Tensor:
    """One axis, or all, of 2^31 and more elements, none of them in memory."""
    sizes = list(like.shape) or [1]
    sizes[rng.randrange(len(sizes))] = rng.choice(HUGE)
    if rng.random() < 0.5:
        return torch.empty(sizes, dtype=like.dtype, device="meta")
    return one(like.dtype).expand(sizes)


class Odd:
    """Neither a number nor anything else."""


def wrong(rng: random.Random) -> Any:
    """A value that few arguments accept."""
    return rng.choice(
        (
            None,
            True,
            False,
            0,
            1,
            -1,
            2,
            7,
            2**31,
            2**63,
            -(2**63),
            10**400,
            0.5,
            -0.0,
            1e-320,
            1e308,
            float("nan"),
            float("inf"),
            -float("inf"),
            "",
            "x",
            "bshd",
            "causal",
            b"x",
            [],
            [1],
            [0, 3],
            [-1],
            [2**40],
            [2**63],
            (),
            (1, 2),
            {},
            {"a": 1},
            set(),
            range(3),
            object(),
            Odd,
            Odd(),
            fractions.Fraction(1, 3),
            1j,
            lambda *_: None,
            torch.float32,
            torch.qint8,
            torch.device("meta"),
            torch.Size([1]),
            torch.strided,
            slice(1),
            ...,
            NotImplemented,
            type,
            [None],
            [[1]],
            ["a"],
            masks.causal(),
            masks.lengths([1]),
            undivided.Machine(device="cpu"),
            torch.tensor(3),
            torch.tensor([1, 2]),
            torch.tensor(True),
            torch.tensor(0.5),
            torch.zeros(2, 3),
            torch.empty(0),
            torch.nn.Identity(),
        )
    )
