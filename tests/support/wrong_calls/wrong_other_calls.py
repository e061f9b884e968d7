"""Wrong calls of `explain`, `merge` and `Machine`."""

# type checkers refuse these calls too
# mypy: ignore-errors

from __future__ import annotations

from wrong_call_inputs import BACKENDS, LSE, OUT, Q, WrongCalls, t

from undivided import Machine, explain, merge

EXPLAIN = (
    "arguments: alibi_slopes, backend, batch_invariant, bias, context_parallel, deterministic, dropout_p, "
    "dropout_seed, k_scale, layout, machine, mask, pages, return_lse, scale, sinks, softcap, v_scale"
)

OTHERS: WrongCalls = {
    # explain
    "explain-layout-none": (
        lambda: explain(Q, Q, Q, layout=None),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got None",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    "explain-unknown": (
        lambda: explain(Q, Q, Q, layout="bshd", softcapp=1),
        "explain must be called with its own arguments, got 'softcapp'",
        f"softcap=\n  {EXPLAIN}",
    ),
    "explain-foreign-keyword": (
        lambda: explain(Q, Q, Q, layout="bshd", window_size=(3, 0)),
        "explain must be called with its own arguments, got 'window_size'",
        f"mask=masks.window(left, right)\n  {EXPLAIN}",
    ),
    "explain-machine-string": (
        lambda: explain(Q, Q, Q, layout="bshd", machine="a100"),
        "machine must be an undivided.Machine or None, got str",
        "Machine.named('a100')",
    ),
    "explain-q-none": (lambda: explain(None, Q, Q, layout="bshd"), "q must be a torch.Tensor, got NoneType", None),
    "explain-backend": (
        lambda: explain(Q, Q, Q, layout="bshd", backend="x"),
        f"backend must be one of {BACKENDS}, got 'x'",
        None,
    ),
    # merge
    "merge-nothing": (
        lambda: merge([], []),
        "lses must be one for each of outs, and at least one, got 0 for 0 outs",
        None,
    ),
    "merge-counts": (
        lambda: merge([OUT], [LSE, LSE]),
        "lses must be one for each of outs, and at least one, got 2 for 1 outs",
        None,
    ),
    "merge-shapes": (
        lambda: merge([OUT, OUT[:1]], [LSE, LSE]),
        (
            "outs must be tensors like the first, [2, 5, 4, 8] torch.float32 on cpu, got [1, 5, 4, 8] "
            "torch.float32 on cpu"
        ),
        None,
    ),
    "merge-lse-shapes": (
        lambda: merge([OUT, OUT], [LSE, LSE[:1]]),
        ("lses must be tensors like the first, [2, 4, 5] torch.float32 on cpu, got [1, 4, 5] torch.float32 on cpu"),
        None,
    ),
    "merge-dtypes": (
        lambda: merge([OUT, OUT.double()], [LSE, LSE]),
        (
            "outs must be tensors like the first, [2, 5, 4, 8] torch.float32 on cpu, got [2, 5, 4, 8] "
            "torch.float64 on cpu"
        ),
        None,
    ),
    "merge-not-tensors": (
        lambda: merge([OUT, None], [LSE, LSE]),
        "outs must be floating-point tensors, got NoneType",
        None,
    ),
    "merge-first-not-tensor": (
        lambda: merge([None, OUT], [LSE, LSE]),
        "outs must be floating-point tensors, got NoneType",
        None,
    ),
    "merge-none": (lambda: merge(None, None), "outs must be a sequence of tensors, got NoneType", None),
    "merge-ambiguous": (
        lambda: merge([t(2, 4, 4, 8)], [t(2, 4, 4)]),
        "layout must be given, as [2, 4, 4, 8] fits bshd and bhsd, got None",
        "merge(outs, lses, layout='bshd')",
    ),
    "merge-fits-none": (
        lambda: merge([OUT], [t(2, 5, 4, 1)]),
        (
            "lses must be [B, H, Sq] for outs in bshd, sbhd or bhsd, [H, T] in thd, got [2, 5, 4, 1] for outs of "
            "[2, 5, 4, 8]"
        ),
        None,
    ),
    "merge-wrong-layout": (
        lambda: merge([OUT], [LSE], layout="bhsd"),
        "lses must be [B, H, Sq] for outs in bhsd, [H, T] in thd, got [2, 4, 5] for outs of [2, 5, 4, 8]",
        "these shapes would fit layout='bshd'",
    ),
    "merge-unknown-layout": (
        lambda: merge([OUT], [LSE], layout="bhds"),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', or None, got 'bhds'",
        None,
    ),
    "merge-sinks-shape": (lambda: merge([OUT], [LSE], t(3)), "sinks must have shape [heads] = [4], got [3]", None),
    "merge-sinks-number": (lambda: merge([OUT], [LSE], 0.0), "sinks must be a floating-point tensor, got float", None),
    "merge-lse-int": (lambda: merge([OUT], [LSE.int()]), "lses must be floating-point tensors, got torch.int32", None),
    "merge-out-int": (lambda: merge([OUT.int()], [LSE]), "outs must be floating-point tensors, got torch.int32", None),
    "merge-sinks-int": (
        lambda: merge([OUT], [LSE], t(4).bool()),
        "sinks must be a floating-point tensor, got torch.bool",
        None,
    ),
    "merge-lse-device": (
        lambda: merge([OUT], [LSE.to("meta")]),
        "lses must be on the device of outs (cpu), got meta",
        None,
    ),
    # Machine
    "machine-device": (lambda: Machine(device="gpu"), "Machine.device must be 'cpu', 'cuda' or None, got 'gpu'", None),
    "machine-no-capability": (
        lambda: Machine(device="cuda"),
        "Machine.compute_capability must be given for a CUDA device, got None",
        "for example (8, 0) for an A100, (9, 0) for an H100",
    ),
    "machine-capability-string": (
        lambda: Machine(device="cuda", compute_capability="8.0"),
        "Machine.compute_capability must be two ints, got '8.0'",
        "for example (8, 0) for an A100, (9, 0) for an H100",
    ),
    "machine-capability-int": (
        lambda: Machine(device="cuda", compute_capability=80),
        "Machine.compute_capability must be two ints, got 80",
        "for example (8, 0) for an A100, (9, 0) for an H100",
    ),
    "machine-package": (
        lambda: Machine(packages={"flashattn": "2"}),
        (
            "Machine.packages must name only flash_attn, flash_attn_3, flash_attn_4, cudnn_frontend, triton, got "
            "['flashattn']"
        ),
        None,
    ),
    "machine-packages-list": (
        lambda: Machine(packages=["flash_attn"]),
        "Machine.packages must map names to versions, as {'flash_attn': '2.8.4'}, got list",
        None,
    ),
    "machine-package-version": (
        lambda: Machine(packages={"flash_attn": "new"}),
        "Machine.packages['flash_attn'] must be a version such as '9.1.0', got 'new'",
        None,
    ),
    "machine-package-none": (
        lambda: Machine(packages={"flash_attn": None}),
        "Machine.packages['flash_attn'] must be a version such as '9.1.0', got None",
        None,
    ),
    "machine-cudnn": (
        lambda: Machine(device="cuda", compute_capability=(8, 0), cudnn="v9"),
        "Machine.cudnn must be a version such as '9.1.0', got 'v9'",
        None,
    ),
    "machine-cudnn-int": (
        lambda: Machine(device="cuda", compute_capability=(8, 0), cudnn=9),
        "Machine.cudnn must be a version such as '9.1.0', got 9",
        None,
    ),
    "machine-torch": (
        lambda: Machine(torch="nightly"),
        "Machine.torch must be a version such as '9.1.0', got 'nightly'",
        None,
    ),
    "machine-named": (
        lambda: Machine.named("a1000"),
        (
            "device must be cpu or one of v100, t4, a100, a10, rtx3090, l4, l40s, rtx4090, h100, h200, b200, "
            "b300, rtx5090, got 'a1000'"
        ),
        "did you mean 'a100'?",
    ),
    "machine-named-none": (
        lambda: Machine.named(None),
        (
            "device must be cpu or one of v100, t4, a100, a10, rtx3090, l4, l40s, rtx4090, h100, h200, b200, "
            "b300, rtx5090, got None"
        ),
        "another GPU: Machine(device='cuda', compute_capability=(8, 0))",
    ),
}
