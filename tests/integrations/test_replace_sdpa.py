"""`replace_sdpa`: unmodified modules run on our function and give PyTorch's results, and everything is restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdpa_models import PYTORCHS, LanguageModel, encoder, results
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import undivided


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert F.scaled_dot_product_attention is PYTORCHS
    assert torch.backends.mha.get_fastpath_enabled()


class ImageBlock(nn.Module):
    """Three-dimensional tensors, positional arguments, a learned bias and the name ``F``."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 9, 9))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.bias, 0.0, False, scale=0.2)


def assert_the_same(module: nn.Module, calls: int, *args: Any, **options: Any) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected = results(module, *args, **options)
    with undivided.replace_sdpa() as replaced:
        found = results(module, *args, **options)
    assert replaced.calls == calls
    torch.testing.assert_close(found, expected)


def padding(batch: int, length: int) -> Tensor:
    """True = padding, as PyTorch's modules have it."""
    return torch.arange(length) >= torch.tensor([length, length // 2])[:batch, None]


@pytest.mark.parametrize("masked", [False, True], ids=["causal-flag", "boolean-mask"])
def test_a_model_that_calls_the_function_directly(masked: bool) -> None:
    mask = ~padding(2, 9)[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril() if masked else None
    assert_the_same(LanguageModel(), 3, torch.randint(50, (2, 9)), mask)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.filterwarnings("ignore")  # of a library that is not ours
def test_a_model_of_the_transformers_library(padded: bool) -> None:
    """Random weights, nothing downloaded: a Llama as others wrote it, trained a step and generating."""
    transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(50, (2, 9))
    attend = torch.ones(2, 9, dtype=torch.long)
    attend[1, : 4 if padded else 0] = 0

    def step() -> list[Tensor]:
        out = model(tokens, attention_mask=attend, labels=tokens)
        real = out.logits[attend.bool()]  # the content of the padding does not matter
        return [real, *torch.autograd.grad(out.loss, list(model.parameters()))]

    def generated() -> Tensor:
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        return model.eval().generate(tokens, attention_mask=attend, **options)

    expected, text = step(), generated()
    with undivided.replace_sdpa() as replaced:
        model.train()
        found = step()
        assert replaced.calls == 3
        assert torch.equal(generated(), text)
    assert replaced.calls == 3 + 3 * 4
    torch.testing.assert_close(found, expected)


class DiffusionBlock(nn.Module):
    """A block of a denoising network: an image attends to itself, then to a text, with an additive mask for each
    head."""

    def __init__(self, channels: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.image_norm = nn.LayerNorm(channels), nn.GroupNorm(2, channels)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.from_image = nn.Linear(channels, channels, bias=False)
        self.text_k, self.text_v = (nn.Linear(context, channels, bias=False) for _ in range(2))
        self.out = nn.Linear(channels, channels)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, _, inner = q.shape
        q, k, v = (t.view(batch, -1, self.heads, inner // self.heads).transpose(1, 2) for t in (q, k, v))
        if mask is not None:  # [B, keys] of 0 and -10000, once for each head
            mask = mask[:, None, None].repeat_interleave(self.heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return out.transpose(1, 2).reshape(batch, -1, inner).to(q.dtype)

    def forward(self, image: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        batch, channels, height, width = image.shape
        x = self.image_norm(image).view(batch, channels, height * width).transpose(1, 2)
        x = x + self.attend(self.to_q(x), self.to_k(x), self.to_v(x))
        keys, values = self.text_k(text), self.text_v(text)
        x = x + self.attend(self.from_image(self.norm(x)), keys, values, (1 - text_mask) * -10000.0)
        return image + self.out(x).transpose(1, 2).view_as(image)


def test_a_denoising_block_of_an_image_and_a_text() -> None:
    text_mask = (~padding(2, 7)).float()
    inputs = torch.randn(2, 16, 3, 5), torch.randn(2, 7, 12), text_mask
    assert_the_same(DiffusionBlock(16, 12), 2, *inputs)
    block = DiffusionBlock(16, 12)
    with undivided.replace_sdpa():  # what the mask hides may be anything: a text's padding
        other = inputs[1].masked_fill(text_mask[..., None] == 0, 1e3)
        torch.testing.assert_close(block(inputs[0], other, text_mask), block(*inputs))


class VisionBlock(nn.Module):
    """A block of an image classifier: pre-norm, ``nn.MultiheadAttention`` without weights, an MLP."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, 4, dropout=0.0, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        x = image + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class WindowedVisionBlock(nn.Module):
    """A block of a windowed image model: windows as batch, packed projections, a learned bias and a mask of windows."""

    def __init__(self, size: int, heads: int = 4, window: int = 3) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.project = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.bias = nn.Parameter(torch.randn(heads, window**2, window**2))

    def forward(self, image: Tensor) -> Tensor:
        batch, height, width, size = image.shape
        w = self.window
        x = image.view(batch, height // w, w, width // w, w, size).transpose(2, 3).reshape(-1, w * w, size)
        q, k, v = self.qkv(x).view(len(x), w * w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        hidden = torch.zeros(len(x), 1, w * w, w * w)
        hidden[-1, :, :, :4] = -100.0  # what was shifted around the edge
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias + hidden)
        x = self.project(x.transpose(1, 2).reshape(len(x), w * w, size))
        return x.view(batch, height // w, width // w, w, w, size).transpose(2, 3).reshape_as(image)


def test_blocks_of_image_models() -> None:
    assert_the_same(VisionBlock(16), 1, torch.randn(2, 10, 16))
    assert_the_same(WindowedVisionBlock(16), 1, torch.randn(2, 6, 6, 16))


def test_a_model_with_three_dimensions_and_a_learned_bias() -> None:
    assert_the_same(ImageBlock(), 1, torch.randn(4, 9, 8))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_padding_mask": padding(2, 7)},
        {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "is_causal": True},
        {"attn_mask": torch.randn(8, 7, 7), "key_padding_mask": padding(2, 7)},
    ],
    ids=["plain", "padding", "causal-mask", "causal-flag", "bias-of-heads-and-padding"],
)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
def test_multihead_attention(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 7, 16)
    assert_the_same(module, 1, x, x, x, need_weights=False, **options)
    assert_the_same(module, 1, x[0], x[0], x[0], need_weights=False)


def test_multihead_attention_with_weights_makes_no_call() -> None:
    """Its default: the weights are requested, so it computes them itself."""
    x = torch.randn(2, 7, 16)
    with undivided.replace_sdpa() as replaced:
        nn.MultiheadAttention(16, 4, batch_first=True)(x, x, x)
    assert replaced.calls == 0


def test_cross_attention_to_a_memory_of_another_length_and_size() -> None:
    module = nn.MultiheadAttention(16, 4, kdim=12, vdim=8, batch_first=True, add_bias_kv=True)
    inputs = torch.randn(2, 7, 16), torch.randn(2, 5, 12), torch.randn(2, 5, 8)
    assert_the_same(module, 1, *inputs, need_weights=False)


ENCODER_MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"src_key_padding_mask": padding(2, 7)},
    "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True},
    "causal-and-padding": {
        "mask": nn.Transformer.generate_square_subsequent_mask(7).isinf(),
        "src_key_padding_mask": padding(2, 7),
    },
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", ENCODER_MASKS.values(), ids=ENCODER_MASKS)
def test_transformer_encoder(options: dict[str, Any], training: bool) -> None:
    assert_the_same(encoder().train(training), 2, torch.randn(2, 7, 16), **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", ENCODER_MASKS.values(), ids=ENCODER_MASKS)
def test_transformer_encoder_without_gradients_leaves_the_fast_path(options: dict[str, Any]) -> None:
    """There PyTorch's C++ fast path would run, which makes no call; it zeroes padded outputs, so real rows are
    compared."""
    module, x = encoder().eval(), torch.randn(2, 7, 16)
    real = ~options.get("src_key_padding_mask", torch.zeros(2, 7, dtype=torch.bool))
    with torch.inference_mode():
        expected = module(x, **options)
        with undivided.replace_sdpa() as replaced:
            found = module(x, **options)
    assert replaced.calls == 2
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


def test_transformer_decoder() -> None:
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    module = nn.TransformerDecoder(layer, 2)
    assert_the_same(
        module,
        4,
        torch.randn(2, 5, 16),
        torch.randn(2, 7, 16),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
        tgt_is_causal=True,
        memory_key_padding_mask=padding(2, 7),
    )


def test_dropout_of_modules_is_ours_in_training_and_off_in_evaluation() -> None:
    module, x = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True), torch.randn(2, 7, 16)
    with undivided.replace_sdpa() as replaced:
        first, second = (module(x, x, x, need_weights=False)[0] for _ in range(2))
        assert not torch.equal(first, second)
        module.eval()
        first, second = (module(x, x, x, need_weights=False)[0] for _ in range(2))
        assert torch.equal(first, second)
    assert replaced.calls == 4
