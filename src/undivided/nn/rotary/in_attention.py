"""The rotation of queries and keys in the attention layers: with caches, packed sequences and context parallelism."""

from __future__ import annotations

from torch import Tensor

from undivided.arguments.layout import Layout
from undivided.cache import InferenceParams
from undivided.cache._layer_caches import once_per_step
from undivided.context_parallel import ContextParallel
from undivided.context_parallel.sharding import Side
from undivided.errors import InputError
from undivided.nn._cached import rows_of_positions
from undivided.nn._context_parallel import rank_freqs
from undivided.nn.arguments.error_names import rename_arguments
from undivided.nn.rotary.rotation import Rotation, compute_rotation, rotate

RotaryPosEmb = Tensor | tuple[Tensor, Tensor]


def rotate_queries_and_keys(
    q: Tensor,
    k: Tensor,
    freqs: RotaryPosEmb,
    *,
    format: Layout,
    interleaved: bool,
    offsets_q: Tensor | None,
    offsets_kv: Tensor | None,
    params: InferenceParams | None,
    is_padded: bool,
    is_cross: bool,
    cp: ContextParallel | None,
) -> tuple[Tensor, Tensor]:
    """q and k rotated by the angles of their positions. In self-attention both have the same rotation, in a step of a
    cache all layers.

    Args:
        q, k: [.., h, d] and [.., g, d] in `format`.
        freqs: angles of all positions, or a pair for queries and keys.
        format: "sbhd", "bshd" or "thd".
        interleaved: the kind of pairs, see `apply_rotary_pos_emb`.
        offsets_q, offsets_kv: offsets of packed sequences, int [b + 1]; used in thd only.
        params: cache, after whose tokens the positions of the queries continue.
        is_padded: whether these are the padded ones, for errors.
        is_cross: whether keys have other positions than queries.
        cp: context parallelism.
    """
    pair = freqs if isinstance(freqs, tuple | list) else (freqs, freqs)
    if len(pair) != 2:
        raise InputError("rotary_pos_emb", "be a tensor, or a pair of queries and keys", f"{len(pair)} entries")
    q_freqs, k_freqs = pair
    if params is not None:  # its steps decide which tokens a rank has
        cp = None
    positions = None if params is None else params.own_positions()
    starts = None if params is None else params.get_seqlens_pre_step()[: params.batch_size]
    if format != "thd":  # cu_seqlens are lengths there, and every row starts at its first position
        offsets_q = offsets_kv = None
    elif params is not None:
        offsets_q = params.cu_seqlens_q[: params.batch_size + 1]

    def rotation(t: Tensor, rows: Tensor, start: Tensor | None, offsets: Tensor | None, side: Side = "q") -> Rotation:
        try:
            if cp is not None:
                rows = rank_freqs(rows, t, format, cp, offsets, side)
            elif positions is not None:
                rows, start = rows_of_positions(rows, positions, format), None
            if offsets is not None and (cp is not None or positions is not None):
                offsets = offsets.new_tensor([0, t.shape[0]])  # row i is that of token i now, as of one sequence
            return compute_rotation(t, rows, format, start, interleaved, offsets)
        except InputError as error:
            offsets_name = f"cu_seqlens_{side}_padded" if is_padded else f"cu_seqlens_{side}"
            tensor = "hidden_states" if side == "q" else "encoder_output"
            names = {"freqs": "rotary_pos_emb", "cu_seqlens": offsets_name, "t": tensor}
            raise rename_arguments(error, names) from None

    def rotation_of_queries(t: Tensor, rows: Tensor) -> Rotation:
        """The rotation of t at the positions of the queries: in self-attention of the keys too."""
        if params is None:
            return rotation(t, rows, starts, offsets_q)
        key = "rotation", format, interleaved, t.shape, t.dtype, t.device
        return once_per_step(params, key, rows, lambda: rotation(t, rows, starts, offsets_q))

    q_rotation = rotation_of_queries(q, q_freqs)
    if is_cross:
        k_rotation = rotation(k, k_freqs, None, offsets_kv, "kv")
    else:
        k_rotation = q_rotation if k_freqs is q_freqs else rotation_of_queries(k, k_freqs)
    return rotate(q, q_rotation), rotate(k, k_rotation)
