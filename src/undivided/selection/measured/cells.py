"""Which measured problem a problem is compared with: its kind, its length, and its work."""

from __future__ import annotations

from typing import NamedTuple

from undivided.arguments.tensors import dtype_name
from undivided.kernels import cpu
from undivided.machine import Machine
from undivided.request.flops import forward_flops, training_flops
from undivided.request.problem import Problem

_SAME = frozenset("backward lse lse_grad bias_grad sinks_grad alibi_grad flipped strided some_heads".split())
"""Features that do not change the kind of a problem."""


class TableCell(NamedTuple):
    """The cell of a problem in a table of rates.

    kind: ``sm90/bfloat16/forward/128/causal+gqa``: architecture, dtype, pass, largest head size, masks and features.
    length, work: bits of the key length, rounded up to a power of two, and of the work.
    """

    kind: str
    length: int
    work: int


def architecture(device: str, machine: Machine) -> str | None:
    """ "sm90" of a GPU, "amx" or "avx2" of a CPU (the native kernel's level); None if it is not known.

    "sm90+FA3" if another implementation replaces PyTorch's own flash kernel, whose rates are different.

    >>> architecture("cuda", Machine.named("h200"))
    'sm90'
    """
    if device == "cpu":
        library = cpu.load() if machine.probed else ""
        return machine.isa.lower() or None if isinstance(library, str) else library.level
    if device == "cuda" and machine.compute_capability is not None and not machine.hip:
        return "sm{}{}".format(*machine.compute_capability) + (f"+{machine.flash_impl}" if machine.flash_impl else "")
    return None


def table_cell(problem: Problem, machine: Machine) -> TableCell | None:
    """The cell of this problem; None on an architecture that has no name."""
    hardware = architecture(problem.device, machine)
    if hardware is None:
        return None
    rounded = problem._replace(q_len=_up(problem.q_len), kv_len=_up(problem.kv_len))
    if problem.documents is not None:
        count, longest_q, longest_kv = problem.documents
        rounded = rounded._replace(documents=(_up(count), _up(longest_q), _up(longest_kv)))
    width = max(32, _up(max(problem.qk_dim, problem.v_dim)))
    kind = f"{hardware}/{dtype_name(problem.dtype)}/{pass_of(problem)}/{width}/{_structure(problem)}"
    _, longest = rounded.longest_lengths
    return TableCell(kind, longest.bit_length(), int(work(rounded)).bit_length())


def _up(length: int | None) -> int:
    return 1 << (length - 1).bit_length() if length else 0


def pass_of(problem: Problem) -> str:
    """The name of the pass: "training", "decode" or "forward"."""
    if "backward" in problem.features:
        return "training"
    longest_q, _ = problem.longest_lengths
    return "decode" if longest_q == 1 else "forward"


def _structure(problem: Problem) -> str:
    """``full``, ``causal+gqa``: masks and features, in alphabetical order."""
    words = problem.mask.kinds | (problem.features - _SAME)
    if pass_of(problem) == "decode" and problem.align != "top_left":
        words -= {"causal"}  # the last query attends to every key
    if problem.deterministic:
        words |= {"deterministic"}
    return "+".join(sorted(words)) or "full"


def work(problem: Problem) -> float:
    """Operations of the pairs in its band, or bytes of keys and values in decoding. Lengths that depend on
    values of tensors count in full.

    >>> import torch, undivided
    >>> q = torch.empty(1, 4, 2, 8, device="meta")
    >>> mask = undivided.masks.causal()
    >>> work(undivided.explain(q, q, q, layout="bshd", mask=mask).problem)  # 2 heads, 10 pairs, 2 * 8 multiply-adds
    640.0
    """
    if pass_of(problem) == "decode":
        row = problem.kv_heads * (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize
        return float(problem.batch * problem.kv_len * row)
    longest_q, longest_kv = problem.longest_lengths
    sequences = problem.batch * problem.q_len / max(longest_q, 1)
    pairs = sequences * problem.heads * _pairs(problem, longest_q, longest_kv)
    count = training_flops if pass_of(problem) == "training" else forward_flops
    return count(pairs, problem.qk_dim, problem.v_dim)


def _pairs(problem: Problem, q_len: int, kv_len: int) -> int:
    """Number of pairs in the band of one sequence and head."""
    left, right = problem.mask.left, problem.mask.right
    shift = kv_len - q_len if problem.align == "bottom_right" else 0
    before_band = 0 if left is None else _keys_before(shift - left, q_len, kv_len)
    up_to_its_end = q_len * kv_len if right is None else _keys_before(shift + right + 1, q_len, kv_len)
    return up_to_its_end - before_band


def _keys_before(first: int, q_len: int, kv_len: int) -> int:
    """Number of keys before ``row + first``, summed over the rows."""
    start = min(max(-first, 0), q_len)  # the rows before it have no such key
    stop = min(max(kv_len - first, start), q_len)  # the rows from it on have all keys
    return (stop - start) * (start + stop - 1) // 2 + (stop - start) * first + (q_len - stop) * kv_len
