"""Masks of fewer keys than a layer has: chunked prefill of encoder-decoder models, and encoders with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers library is not installed")

import transformers_models as models
from transformers import EncoderDecoderCache

from undivided.errors import InputError
from undivided.integrations.transformers import Cache, attention, model_mask, register
from undivided.integrations.transformers._names import cache_name

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def generated(network: Any, **options: Any) -> torch.Tensor:
    """8 tokens, by default after a decoder's text of 9."""
    text = {"input_ids": models.tokens(), "decoder_input_ids": models.tokens(length=9, seed=3)} | options
    answer: torch.Tensor = network.generate(**text, max_new_tokens=8, do_sample=False)
    return answer


def test_the_text_of_the_decoder_in_chunks_gives_the_same_tokens() -> None:
    ours = models.build("t5", "undivided")
    assert torch.equal(generated(ours, prefill_chunk_size=4), generated(ours))
    assert torch.equal(generated(ours), generated(models.build("t5", "eager")))


def test_an_attention_mask_that_transformers_cuts_is_refused_with_what_to_leave_out() -> None:
    """It masks keys of the encoder, but is cut to the tokens of the decoder: eager fails, or ignores the other keys."""
    real = models.real_tokens("right")
    with pytest.raises(InputError, match="11 keys, as this layer has, got one for 4 and 4") as caught:
        generated(models.build("t5", "undivided"), attention_mask=real, prefill_chunk_size=4)
    assert caught.value.hint is not None
    assert "leave out prefill_chunk_size of generate" in caught.value.hint
    with pytest.raises(RuntimeError, match="must match the size"):
        generated(models.build("t5", "eager"), attention_mask=real, prefill_chunk_size=4)


def test_a_cache_for_the_decoder_alone_is_refused_with_the_class_that_has_both() -> None:
    """The keys of the encoder are appended to those of the decoder; eager fails on the sizes."""
    ours, text = models.build("t5", "undivided"), {"attention_mask": models.real_tokens("right")}
    with pytest.raises(InputError, match="1 queries and 12 keys, as this layer has, got one for 1 and 11") as caught:
        generated(ours, decoder_input_ids=None, **text, **{cache_name(ours): Cache()})
    assert caught.value.hint is not None
    assert "EncoderDecoderCache(cache, another)" in caught.value.hint
    both = EncoderDecoderCache(Cache(quantize="int8"), Cache(quantize="int8"))
    with_cache = generated(ours, decoder_input_ids=None, **text, **{cache_name(ours): both})
    assert torch.equal(with_cache, generated(models.build("t5", "eager"), decoder_input_ids=None, **text))


def test_an_encoder_that_is_given_a_cache_is_refused_with_the_setting_of_a_decoder() -> None:
    """BERT without ``is_decoder`` builds a mask for the new token alone, while its cache returns all keys."""
    ours = models.build("bert", "undivided")
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 12, 8)
    layer = ours.bert.encoder.layer[0].attention.self
    with pytest.raises(InputError, match="1 queries and 12 keys") as caught:
        attention(layer, q, k, k, model_mask(1, 1, 1))
    assert caught.value.hint == "config.is_decoder=True for a model that generates with a cache"
