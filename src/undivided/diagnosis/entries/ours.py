"""Errors of this library, which contain their own reasons."""

from __future__ import annotations

from undivided.diagnosis import _values
from undivided.diagnosis._entry import PRECISE, Entry

ENTRIES = (
    Entry(
        id="undivided-no-backend",
        title="No allowed backend can run this problem",
        patterns=(r"no backend can run this problem", r"undivided\.errors\.NoBackendError"),
        example="""undivided.errors.NoBackendError: no backend can run this problem
              problem: q 1x4x8x16 (BxSxHxD), kv 1x4x8x16; float32 bshd on cpu; mask every pair
              cudnn  device=cpu (runs on cuda)
              could run: native, torch_flash, reference
              HINT: an explicit backend='cudnn' never falls back; leave it out to let selection choose""",
        cause="""The reference runs every problem except batch_invariant=True. So either that option is set, or backend=,
            use_backends, set_backends, sdpa_kernel, UNDIVIDED_BACKENDS or an NVTE_* variable excludes the reference.
            Each line under the message is one backend with the reasons why it was refused; of a requested backend,
            its own reasons and the names of those that could run.""",
        confirm="error.decision.reasons has the reasons by name; undivided doctor shows the variables that are set.",
        fix="Leave backend= or batch_invariant out, or put a backend that can run it last in the list.",
        call="""
            q, k, v = (torch.randn(1, 4, 8, 16) for _ in range(3))
            with undivided.use_backends("flash", "reference"):
                out = undivided.attention(q, k, v, layout="bshd")
            """,
        source="undivided.errors.NoBackendError",
        weight=PRECISE,
        reads=_values.own_hint,
    ),
    Entry(
        id="undivided-input",
        title="An argument of an undivided function is wrong",
        patterns=(
            r"(?:undivided\.errors\.)InputError: ",
            r"\bInputError: \w[\w.]* must ",
            r" must .{1,300} got .{1,300} HINT: ",
        ),
        example="""undivided.errors.InputError: k must have a number of heads that divides q's (8), got 3 in [1, 4, 3, 16]
              HINT: these shapes would fit layout='bhsd'""",
        cause="The message names the argument, the rule and the value; nothing was computed or changed.",
        confirm="error.argument and error.hint have the argument and the hint.",
        fix="Do what the HINT says.",
        call="""
            q, k, v = (torch.randn(1, 8, 4, 16) for _ in range(3))
            try:
                undivided.attention(q, k[:, :3], v[:, :3], layout="bhsd")
            except undivided.InputError as error:
                print(undivided.diagnose(error))
            """,
        source="undivided.errors.InputError",
        weight=PRECISE,
        reads=_values.input_error,
    ),
    Entry(
        id="undivided-rank",
        title="A call that needs all ranks failed: another rank ended, hangs or refused its arguments",
        patterns=(r"\bRankError: ", r"another rank refused its arguments: "),
        example="""undivided.context_parallel.exchange.collectives.RankError: rank 0 of 4: strategy 'ring': the comparison of
              arguments with rank 3 failed: Connection closed by peer
              HINT: a rank ended, or did not make the same call within the group's timeout; the ranks of the group are
              the processes [0, 1, 2, 3]""",
        cause="""The fault is on the rank that the message names, in its CAUSE if there is one: it raised an error, ended, or did
            not make the same call before the timeout of the group.""",
        confirm="Read the output of the named rank; the processes of the group are listed in the HINT.",
        fix="""Fix the error of that rank. If it was only slow, increase the timeout of init_process_group; if ranks call in
            different orders, make their calls equal. docs/how-to/train-on-many-machines.md has the faults in a table.""",
        call="""
            from undivided.context_parallel import simulate

            def step(group):  # every rank makes the same call
                cp = undivided.ContextParallel(group).bind(8)
                x = cp.shard(torch.zeros(1, 8, 2, 16), layout="bshd")
                return undivided.attention(
                    x, x, x, layout="bshd", context_parallel=cp
                ).shape

            shapes = simulate(2, step)
            """,
        source="undivided.context_parallel.RankError",
        weight=PRECISE,
        reads=_values.own_hint,
    ),
    Entry(
        id="undivided-not-registered",
        title='transformers: attn_implementation="undivided" is unknown',
        patterns=(r"KeyError: ['\"]undivided['\"]", r"Specified `attn_implementation=\"undivided\"` is not supported"),
        example="""ValueError: Specified `attn_implementation="undivided"` is not supported. The only possible arguments are
            `attn_implementation="eager"`, `"attn_implementation=sdpa"`.""",
        cause="""The name is registered by register(), once per process, before the model is built or switched. Versions of
            transformers that do not check the name raise KeyError: 'undivided' in the first forward pass.""",
        confirm="The program does not call undivided.integrations.transformers.register(), or calls it after the model.",
        fix="Call register() before the model is built or loaded, in every process.",
        call="""
            # before the model is built:
            # from undivided.integrations.transformers import register
            # register()
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal())
            """,
        source="undivided.integrations.transformers.register",
        weight=PRECISE,
    ),
    Entry(
        id="undivided-native-not-built",
        title="The native CPU kernel is missing, and calls run on PyTorch's slower kernels",
        patterns=(r"The native CPU kernel was not built", r"the native kernel's library was not built"),
        example="""RuntimeWarning: calls on the CPU run on PyTorch's kernels, which are slower: the native kernel's library was
            not built: the installation found no C++ compiler, or the build failed; install g++ or clang++""",
        cause="""The installation found no C++17 compiler, its build failed, or the wheel is the pure Python one. Results agree
            within the error budget; only the speed differs.""",
        confirm="undivided doctor shows how the package was installed, and the reason.",
        fix="""Install g++ or clang++ and run the command that undivided doctor prints. It ends in an error if the build fails:
            pip install -C wheel.cmake=true .""",
        call="""
            # which backends are available, and why others are not
            table = undivided.backends()
            print(table)
            """,
        source="docs/how-to/install.md",
        weight=PRECISE,
    ),
    Entry(
        id="torch-without-numpy",
        title="PyTorch warns that NumPy is missing or incompatible",
        patterns=(r"Failed to initialize NumPy: (?P<why>[^.(]{1,80})",),
        example="""UserWarning: Failed to initialize NumPy: No module named 'numpy' (Triggered internally at
            /pytorch/torch/csrc/utils/tensor_numpy.cpp:84.)""",
        cause="""PyTorch does not install NumPy, and warns at its import if it is missing, or built for another major version.
            Undivided does not need it.""",
        confirm="python -c 'import numpy; print(numpy.__version__)'",
        fix="pip install numpy; or ignore the warning, if the program uses no arrays of NumPy.",
        call="""
            # needs no NumPy
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal())
            """,
        source="torch/csrc/utils/tensor_numpy.cpp",
        reads=lambda match, text: [f"The reason given: {match['why'].strip()}."],
    ),
    Entry(
        id="undivided-command-line-packages",
        title="The command `undivided` needs packages that are not installed",
        patterns=(r"undivided: the command line needs (?P<name>\w{1,40})",),
        example="undivided: the command line needs rich: pip install 'undivided[cli]'",
        cause="The command line is an extra: the library depends on torch only.",
        confirm="python -c 'import rich, typer'",
        fix="""pip install '.[cli]' in a checkout; 'undivided[cli]' is the name of a release. `undivided report` needs
            '.[cli,report]'.""",
        call="""
            # the same answers without the command line
            q = torch.randn(1, 16, 4, 64)
            print(undivided.explain(q, q, q, layout="bshd", mask=masks.causal()))
            """,
        source="docs/how-to/install.md",
        weight=PRECISE,
        reads=lambda match, text: [f"The missing package is {match['name']}."],
    ),
)
