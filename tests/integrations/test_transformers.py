"""Models of Hugging Face Transformers give the same logits, gradients and tokens under "undivided" as under "eager"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the transformers library is not installed")

import transformers
import transformers_models as models  # beside this file; it imports transformers

from undivided.integrations.transformers import _active, _attention, _weights, register, speed
from undivided.integrations.transformers._names import cache_name
from undivided.integrations.transformers.sweep import _models

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours

Counter = Callable[[], int]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """The number of calls that ran on Undivided; with none, eager would be compared with itself."""
    register()
    count = 0

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            result = run(*args, **options)
            count += result is not None
            return result

        return call

    monkeypatch.setattr(_weights, "attend", counting(_weights.attend))
    monkeypatch.setattr(_attention, "repeated", counting(_attention.repeated))
    yield lambda: count
    assert count > 0


def pair(name: str, **changes: Any) -> list[Any]:
    return [models.build(name, implementation, **changes) for implementation in ("eager", "undivided")]


def gradients(loss: Tensor, network: nn.Module) -> list[Tensor]:
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    return [g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Sums in another order, through two layers and a loss: a millionth of the largest value, and float32's own
    bound."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1.3e-6, atol=1e-6 + 5e-6 * float(other.abs().max()))


def text_step(network: Any, side: str, causal: bool = True, **options: Any) -> list[Tensor]:
    """Logits of the real tokens, and gradients of the loss over them."""
    text, real = models.tokens(), models.real_tokens(side)
    first = real.cumsum(1) == 1  # the token before it is padding, and predicts nothing
    ignored = (real == 0) | first if causal else real == 0
    out = network(text, attention_mask=real, labels=text.masked_fill(ignored, -100), **options)
    return [out.logits[real.bool()], *gradients(out.loss, network)]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", models.DECODERS)
def test_decoders_train_the_same(name: str, side: str) -> None:
    eager, ours = pair(name)
    assert_close(text_step(ours, side), text_step(eager, side))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", models.ENCODERS)
def test_encoders_train_the_same(name: str, side: str) -> None:
    eager, ours = pair(name)
    assert_close(text_step(ours, side, causal=False), text_step(eager, side, causal=False))


def inputs_of(name: str) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": models.tokens(), "attention_mask": models.real_tokens("right")}


@pytest.mark.parametrize("name", models.SEQ2SEQ)
def test_sequence_to_sequence_models_train_the_same(name: str) -> None:
    """Position biases and their gradients (T5), cross-attention to padded and to unpadded keys."""

    def step(network: Any) -> list[Tensor]:
        out = network(**inputs_of(name), labels=models.tokens(length=7, seed=1))
        return [out.logits, *gradients(out.loss, network)]

    eager, ours = pair(name)
    assert_close(step(ours), step(eager))


GENERATION: dict[str, dict[str, Any]] = {
    "dynamic-cache": {},
    "static-cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
@pytest.mark.parametrize("name", [*models.DECODERS, *models.SEQ2SEQ])
def test_generation_gives_the_same_20_tokens(name: str, options: dict[str, Any]) -> None:
    """Left-padded prompts; windows and chunks are shorter than prompt and answer, so that caches forget and roll
    over."""
    inputs = inputs_of(name)
    if name in models.DECODERS:
        inputs = {"input_ids": models.tokens(), "attention_mask": models.real_tokens("left")}

    def generated(network: Any) -> Tensor:
        text: Tensor = network.generate(
            **inputs, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0, **options
        )
        return text

    eager, ours = (generated(network) for network in pair(name))
    assert torch.equal(ours, eager)
    assert len(ours.unique()) > 4, "a model that repeats itself shows little"


@pytest.mark.parametrize("name", ["llama", "mistral", "llama-4"])
def test_right_padded_prompts_leave_holes_in_the_cache(name: str) -> None:
    """The answer begins after the padding: keys are real, then not, then real again."""
    text, real = models.tokens(), models.real_tokens("right")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    eager, ours = (m.generate(text, attention_mask=real, **options) for m in pair(name))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("name", ["llama", "gemma-3", "llama-4"])
def test_chunked_prefill_and_answers_of_several_tokens(name: str) -> None:
    """Chunked prefill: the second piece meets a cache, and its queries begin in the middle."""
    text, real = models.tokens(), models.real_tokens("left")

    def logits(network: Any) -> Tensor:
        name = cache_name(network)
        past, found = None, []
        for start, stop in ((0, 4), (4, 9), (9, 11)):
            out = network(text[:, start:stop], attention_mask=real[:, :stop], use_cache=True, **{name: past})
            past = out[name]
            found.append(out.logits)
        return torch.cat(found, 1)[real.bool()]

    eager, ours = (logits(network) for network in pair(name))
    assert_close([ours], [eager])


POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma-2", "phi-3", "llama-4"])
def test_packed_documents_by_their_positions(name: str, batch: int) -> None:
    """The same as eager, whose dense mask is made of the same positions; and as each document alone."""
    text, positions = models.tokens(batch), POSITIONS[:batch]

    def step(network: Any) -> list[Tensor]:
        out = network(text, position_ids=positions, labels=text, use_cache=False)
        return [out.logits, *gradients(out.loss, network)]

    eager, ours = pair(name)
    found = step(ours)
    assert_close(found, step(eager))
    assert_close([found[0][0, 4:]], [ours(text[:1, 4:]).logits[0]])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_packed_documents_by_cumulative_lengths(name: str) -> None:
    """What a collator for flash attention gives. It holds where transformers does not look at positions: with a cache,
    and in models that do not pass them on to their masks (GPT-OSS)."""
    text, cu = models.tokens(1), torch.tensor([0, 4, 11], dtype=torch.int32)
    _, ours = pair(name)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    for use_cache in (True, False):
        found = ours(text, position_ids=POSITIONS[:1], use_cache=use_cache, **lengths).logits[0]
        assert_close([found[:4], found[4:]], [ours(text[:, :4]).logits[0], ours(text[:, 4:]).logits[0]])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma-2", "t5"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    """With dropout, recomputation drops the same entries: the same gradients as without checkpoints."""

    def step(checkpoints: bool) -> list[Tensor]:
        rates = {"dropout_rate": 0.3} if name == "t5" else {"attention_dropout": 0.3}
        network = models.build(name, "undivided", **rates).train()
        if checkpoints:
            network.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(7)
        out = network(**inputs_of("t5"), labels=models.tokens(length=11, seed=1), use_cache=False)
        return [out.logits.detach(), *gradients_backward(out.loss, network)]

    assert_close(step(checkpoints=True), step(checkpoints=False))


def gradients_backward(loss: Tensor, network: nn.Module) -> list[Tensor]:
    """By ``backward``, which reentrant checkpoints need."""
    loss.backward()
    return [weight.grad for weight in network.parameters() if weight.grad is not None]


def test_attention_dropout_is_applied_only_in_training() -> None:
    network = models.build("llama", "undivided", attention_dropout=0.5)
    plain = models.build("llama", "undivided")
    text = models.tokens()
    assert_close([network(text).logits], [plain(text).logits])
    network.train()
    torch.manual_seed(0)
    first, second = network(text).logits, network(text).logits
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(network(text).logits, first)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("name", ["llama", "gemma-2", "gpt-oss", "bert", "t5"])
def test_autocast_to_bfloat16(name: str, cache: bool) -> None:
    """As close to the float32 model as eager is under autocast. (Rotation leaves queries and keys in float32 there.)"""
    options: dict[str, Any] = inputs_of("t5")
    if name == "t5":
        options["labels"] = models.tokens(length=7, seed=1)
    elif name != "bert":
        options |= {"attention_mask": models.real_tokens("left"), "use_cache": cache}
    real = slice(None) if name == "t5" else options["attention_mask"].bool()

    def logits(network: Any, low: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            found: Tensor = network(**options).logits[real].float()
        return found

    eager, ours = pair(name)
    exact = logits(eager, low=False)
    of_eager = (logits(eager, low=True) - exact).norm()
    assert (logits(ours, low=True) - exact).norm() <= 2 * of_eager
    assert of_eager < 0.2 * exact.norm()


@pytest.mark.parametrize("name", ["llama", "gemma-2"])
def test_models_in_bfloat16(name: str) -> None:
    eager, ours = pair(name)
    text, real = models.tokens(), models.real_tokens("left")
    exact = eager(text, attention_mask=real).logits[real.bool()]
    low = [network.bfloat16()(text, attention_mask=real).logits[real.bool()].float() for network in (eager, ours)]
    assert (low[1] - exact).norm() <= 2 * (low[0] - exact).norm()


@pytest.mark.parametrize("name", ["llama", "gemma-2", "gpt-oss", "bert", "t5", "whisper"])
def test_the_weights_on_request(name: str) -> None:
    """``output_attentions=True``: eager's, in the rows of real tokens."""
    inputs = inputs_of(name)
    if name in models.SEQ2SEQ:
        inputs["decoder_input_ids"] = models.tokens(length=5)
    eager, ours = (network(**inputs, output_attentions=True) for network in pair(name))
    names = [
        key for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions") if key in ours
    ]
    assert names
    for key in names:
        for found, expected in zip(ours[key], eager[key], strict=True):
            rows = torch.ones(1) if found.shape[2] != 11 else inputs["attention_mask"][:, None, :, None]
            assert_close([found * rows], [expected * rows])


@pytest.mark.parametrize("name", ["gpt-2", "clipseg"])
def test_the_weights_of_layers_that_collect_them_by_hooks(name: str) -> None:
    """OPT, GPT-2, SigLIP, DPT, YOLOS and others collect weights by hooks and do not hand ``output_attentions`` to their
    layers. CLIPSeg's layers are told."""
    kind = {"gpt-2": "gpt2", "clipseg": "clipseg_vision_model"}[name]
    eager, ours = (tiny(kind, implementation) for implementation in ("eager", "undivided"))
    inputs = {"input_ids": models.tokens()} if name == "gpt-2" else {"pixel_values": torch.randn(2, 3, 32, 32)}
    found, expected = (network(**inputs, output_attentions=True).attentions for network in (ours, eager))
    assert_close(list(found), list(expected))
    assert len(found) == 2


def test_gemma_4_slices_its_mask() -> None:
    """Its layers that share keys and values compute the last position alone, with the last row of the mask."""
    changes = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    eager, ours = (
        tiny("gemma4_text", implementation, transformers.Gemma4ForCausalLM, changes)
        for implementation in ("eager", "undivided")
    )
    text, real = models.tokens(), models.real_tokens("left")
    options = {"attention_mask": real, "use_cache": True}
    found, expected = (network(text, **options, logits_to_keep=1).logits for network in (ours, eager))
    assert_close([found], [expected])
    options |= {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(text, **options), eager.generate(text, **options))


def tiny(kind: str, implementation: str, network_class: Any = None, changes: Any = None) -> Any:
    """A tiny model of the sweep, by its model type."""
    if network_class is None:
        return _models.build(kind, implementation)
    config_class = transformers.AutoConfig.for_model(kind).__class__
    config = _models.tiny_config(config_class, _models.VARIANTS[0], changes)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    network = network_class(config).eval()
    _models.randomize(network)
    return network


HEADS = ["OPTForQuestionAnswering", "GPTNeoXForTokenClassification", "DiffLlamaForTokenClassification", "CLIPTextModel"]


@pytest.mark.parametrize("name", HEADS)
def test_only_rows_of_padding_differ_from_eager(name: str) -> None:
    """Padding on the left attends to nothing: 0 here and with `sdpa`, the mean of all values with `eager`. A head that
    reads such a row (a score for every position; CLIP without an end of text) shows it; real rows are equal."""
    kinds = dict(zip(HEADS, ("opt", "gpt_neox", "diffllama", "clip_text_model"), strict=True))
    networks = [tiny(kinds[name], way, getattr(transformers, name)) for way in ("eager", "undivided", "sdpa")]
    real = models.real_tokens("left").bool()
    text = models.tokens().masked_fill(~real, 1) % 10
    outputs = [network(input_ids=text, attention_mask=real.long()) for network in networks]
    eager, ours, sdpa = (next(iter(out.values())) for out in outputs)
    assert_close([ours[real]], [eager[real]])
    assert_close([ours], [sdpa])
    assert float((ours - eager)[~real].abs().max()) > 0.1


def test_switching_an_existing_model() -> None:
    network = models.build("llama", "eager")
    text = models.tokens()
    expected = network(text).logits
    network.set_attn_implementation("undivided")
    assert_close([network(text).logits], [expected])


@pytest.mark.slow
def test_compiled_models_leave_their_graph_for_masks_alone() -> None:
    """Masks are read from closures, which a compiler cannot; the attention of the layers is in the graphs."""
    torch._dynamo.reset()
    network = models.build("mistral", "undivided")
    expected = text_step(network, "left")
    compiled = torch.compile(network, backend="aot_eager")
    text, real = models.tokens(), models.real_tokens("left")
    out = compiled(text, attention_mask=real, labels=text.masked_fill(real.cumsum(1) <= 1, -100))
    assert_close([out.logits[real.bool()], *gradients(out.loss, network)], expected)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="masks are read from closures"):
        torch.compile(network, backend="aot_eager", fullgraph=True)(text)
    torch._dynamo.reset()


@pytest.mark.slow
def test_layers_of_compiled_models_break_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer left its graph twice, to read variables of the context."""
    monkeypatch.setattr(_active, "_was_set", False)  # as in a process without `parallelize`
    counts = []
    for layers in (1, 3):
        torch._dynamo.reset()
        network = models.build("llama", "undivided", num_hidden_layers=layers)
        with torch.no_grad():
            counts.append(torch._dynamo.explain(network)(models.tokens(), use_cache=False).graph_break_count)
    torch._dynamo.reset()
    assert counts[0] == counts[1]


def test_the_speed_table_compares_before_it_times(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """No figure where a result is wrong; otherwise a row for each kind of work and dtype."""
    small = ["--turns", "1", "--layers", "1", "--hidden", "64", "--heads", "4", "--prefill", "32", "--cached", "32"]
    small += ["--steps", "2", "--training", "32", "--processor-time"]
    speed.main(small)
    rows = capsys.readouterr().out.strip().splitlines()[4:]
    assert [row.split(" | ")[0] for row in rows] == ["| prefill", "| decoding", "| training step"] * 2
    ours = _weights.attend
    monkeypatch.setattr(_weights, "attend", lambda *args, **options: 1.01 * ours(*args, **options))
    monkeypatch.setattr(_attention, "repeated", lambda *args: None)
    with pytest.raises(RuntimeError, match="'undivided'\\] exceed twice eager's, so nothing is timed"):
        speed.main(small)
