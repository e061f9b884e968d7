"""`generate_batch` of Hugging Face Transformers gives the tokens of `generate`, one request after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the transformers library is not installed")
pytest.importorskip("transformers.generation.continuous_batching", reason="this transformers has none")

import transformers
import transformers_models as models  # beside this file; it imports transformers
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

from undivided.errors import InputError
from undivided.integrations.transformers import _continuous_batching, register

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours

NEW = 14
LENGTHS = (3, 17, 9, 40, 1, 25)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of the calls that attended over the cache."""
    register()
    seen: list[dict[str, Any]] = []
    ours = _continuous_batching.attend

    def recording(*tensors: Any, **options: Any) -> Any:
        seen.append(options)
        return ours(*tensors, **options)

    monkeypatch.setattr(_continuous_batching, "attend", recording)
    return seen


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (length,), generator=generator).tolist() for length in lengths]


def batched(network: Any, texts: list[list[int]], **settings: Any) -> list[list[int]]:
    """The new tokens of each request; the pages are small, and prompts are longer than a step."""
    settings = {"page_size": 4, "num_blocks": 128, "max_batch_tokens": 24, **settings}
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(**settings)
    results = network.generate_batch(texts, generation_config=greedy, continuous_batching_config=batching)
    found = {tuple(one.prompt_ids): one for one in results.values()}
    assert not [one.error for one in found.values() if one.error]
    return [found[tuple(text)].generated_tokens for text in texts]


def one_by_one(name: str, texts: list[list[int]]) -> list[list[int]]:
    network = models.build(name, "eager")
    greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return [network.generate(torch.tensor([text]), **greedy)[0, len(text) :].tolist() for text in texts]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma-2", "gemma-3", "gpt-oss"])
def test_a_batch_gives_the_tokens_of_single_requests(name: str, calls: list[dict[str, Any]]) -> None:
    """Full attention, windows shorter than the prompts, a softcap, and sinks."""
    network = models.build(name, "undivided")
    assert batched(network, prompts()) == one_by_one(name, prompts())
    assert calls, "the cache was not read through this library"
    assert network.config._attn_implementation == "undivided"


def test_full_attention_reads_the_pages_in_place(calls: list[dict[str, Any]]) -> None:
    batched(models.build("llama", "undivided"), prompts())
    paged = [options["pages"] for options in calls if options["pages"] is not None]
    assert len(paged) >= 2 * (NEW - 1)  # two layers
    assert all(first is second for first, second in zip(paged[::2], paged[1::2], strict=True)), "one table per step"


def test_other_implementations_stay_as_they_are(calls: list[dict[str, Any]]) -> None:
    """From transformers 5.24 on, layers update the cache, and `register` changes what it gives to ours."""
    assert batched(models.build("llama", "sdpa"), prompts()) == one_by_one("llama", prompts())
    assert not calls


def test_the_former_prefix_of_paged_implementations_is_accepted() -> None:
    network = models.build("llama", "paged|undivided")
    assert batched(network, prompts((5, 9))) == one_by_one("llama", prompts((5, 9)))


def test_requests_that_begin_alike_share_pages() -> None:
    """The second request comes after the first has ended, so that its prefix is found in the cache."""
    network = models.build("llama", "undivided")
    common, *ends = prompts((30, 3, 6))
    texts = [[*common, *end] for end in ends]
    assert batched(network, texts, max_requests_per_batch=1) == one_by_one("llama", texts)


def test_a_cache_with_few_pages_gives_the_same_tokens() -> None:
    """Requests wait or start again if there are no free pages."""
    network = models.build("llama", "undivided")
    assert batched(network, prompts(), num_blocks=20) == one_by_one("llama", prompts())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma-3"])
def test_compiled_steps_are_padded_to_static_sizes(name: str) -> None:
    """Padding behind the tokens of all requests, and behind the keys that a step gathers, was refused."""
    compiled = CompileConfig(backend="eager", fullgraph=False)
    network = models.build(name, "undivided")
    found = batched(network, prompts(), varlen_compile_config=compiled, kv_padding_interval_size=64)
    torch._dynamo.reset()
    assert found == one_by_one(name, prompts())


def test_a_pass_that_is_repeated_for_a_graph_reads_its_lengths_again(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph is captured after a pass with the same tensors: what follows from their values must be in it."""
    from transformers.generation.continuous_batching import model_runner

    once = model_runner.ModelRunner._forward_process_and_sample

    def twice(*arguments: Any) -> None:
        once(*arguments)
        once(*arguments)

    monkeypatch.setattr(model_runner.ModelRunner, "_forward_process_and_sample", twice)
    assert batched(models.build("llama", "undivided"), prompts()) == one_by_one("llama", prompts())
    steps = [options["mask"] for options in calls]
    assert all(first is second for first, second in zip(steps[::2], steps[1::2], strict=True)), "one mask per pass"
    assert all(warm_up is not captured for warm_up, captured in zip(steps[::4], steps[2::4], strict=True))


def test_an_unknown_cache_is_refused() -> None:
    from undivided.integrations.transformers import attention

    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(InputError, match="cache must be None"):
        attention(torch.nn.Module(), q, q, q, cache=object())


def test_a_block_table_of_the_library_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(InputError, match=r"(?s)block_table must be None.*max_blocks_per_request=0"):
        _continuous_batching.attention(q, q, q, None, 0, {"block_table": q})


def test_a_model_that_keeps_the_keywords_of_a_step_to_itself_is_refused() -> None:
    """StableLM: the error was a KeyError, as with other implementations."""
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(InputError, match=r"(?s)read_index must be passed on to the attention.*model.generate instead"):
        _continuous_batching.attention(q, q, q, None, 0, {"cu_seq_lens_q": torch.tensor([0, 3])})


def allocator_of(heads: int) -> Any:
    """An allocator of pages for heads of 8, in place of that of transformers."""
    stored = torch.zeros(8, 16, heads, 8)
    return SimpleNamespace(index=0, get_cache_for_block_table=lambda layer: (stored, stored))


def test_heads_that_the_cache_has_no_place_for_are_refused() -> None:
    """The error was one of `Tensor.index_copy_`."""
    cache, q = SimpleNamespace(layer_to_allocator=[allocator_of(2)]), torch.randn(1, 4, 3, 8)
    arguments = {"read_index": [torch.arange(0)], "write_index": [torch.arange(3)]}
    with pytest.raises(InputError, match=r"(?s)key and value must have 2 heads of 8, .*got 4 and 4 heads of 8 and 6"):
        _continuous_batching.attention(q, q, q[..., :6], cache, 0, arguments)


def test_a_layer_that_changes_cached_keys_is_not_found_too_late() -> None:
    q = torch.randn(1, 4, 3, 8)
    cache = SimpleNamespace(layer_to_allocator=[allocator_of(4)], _undivided_new={0: (q.clone(), q)})
    arguments = {"read_index": [torch.arange(3)], "write_index": [torch.arange(3)]}
    with pytest.raises(InputError, match="key must be what the cache returned if cached keys are read"):
        _continuous_batching.attention(q, q, q, cache, 0, arguments)


@pytest.mark.parametrize("name", ["DiffLlama", "JetMoe"])
def test_layers_that_compute_with_all_cached_keys(name: str) -> None:
    """DiffLlama splits its values after the cache, and attends twice: it cached the halves, and its tokens were wrong.
    JetMoE repeats its keys, which did not fit into the cache."""
    own = {"kv_channels": 8, "num_experts_per_tok": 2, "num_local_experts": 4} if name == "JetMoe" else {}
    config = {**models.LM, **own}
    if name == "JetMoe":
        config = {key: value for key, value in config.items() if key != "num_attention_heads"}
    found = []
    for implementation in ("sdpa", "undivided"):
        torch.manual_seed(0)
        made = getattr(transformers, f"{name}Config")(**config, attn_implementation=implementation)
        network = getattr(transformers, f"{name}ForCausalLM")(made).eval()
        for label, parameter in network.named_parameters():
            if parameter.dim() > 1 or not label.endswith("weight"):
                nn.init.normal_(parameter, std=0.25)
        found.append(batched(network, prompts()))
    assert found[0] == found[1]
