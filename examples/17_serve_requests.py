"""64 requests served from one paged cache: mixed steps, shared prompts, and the tokens that each would get alone.

Every step packs the new tokens of all running requests: some read a piece of their prompt, most decode one token. A
prompt's pages are indexed when it has been read, so that later requests with the same beginning start behind it. If
the pages do not suffice for a step, the request that came last gives its own up and starts again later. The model is a
small decoder with random weights; the scheduler does not depend on it. Requires `pip install ".[cli]"` in a checkout,
for the progress bar.
"""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
from rich.progress import Progress
from torch import Tensor, nn

from undivided import CacheFullError, InferenceParams, RotaryPositionEmbedding, TransformerLayer

VOCABULARY, WIDTH, HEADS, GROUPS, LAYERS, PAGE = 512, 256, 8, 2, 2, 16
SLOTS, STEP_TOKENS = 12, 96  # requests that run at once, and new tokens per step
torch.manual_seed(0)


@dataclass
class Request:
    name: int
    prompt: list[int]
    count: int  # of tokens to generate
    new: list[int] = field(default_factory=list)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        options = {"num_gqa_groups": GROUPS, "self_attn_mask_type": "padding_causal", "attn_input_format": "thd"}
        self.layers = nn.ModuleList(
            TransformerLayer(WIDTH, 2 * WIDTH, HEADS, layer_number=n + 1, device="cpu", **options)
            for n in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.rotary = RotaryPositionEmbedding(WIDTH // HEADS)(1024)

    def forward(self, tokens: Tensor, cache: InferenceParams, last: Tensor) -> Tensor:
        """The logits after the `last` token of each request."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, inference_params=cache, rotary_pos_emb=self.rotary)
        return self.head(x[last])


def new_cache(quantize: str | None = None) -> InferenceParams:
    return InferenceParams(
        SLOTS, 512, GROUPS, WIDTH // HEADS, dtype=torch.float32, is_paged=True, page_size=PAGE, qkv_format="thd",
        total_num_pages=48, quantize=quantize, device="cpu",
    )  # fmt: skip


def serve(model: Decoder, requests: list[Request], quantize: str | None, show: Progress) -> tuple[int, int, int, str]:
    """Runs all requests; the numbers of steps, of cached tokens that were found, of restarts, and the memory."""
    cache, waiting, steps, reused, restarts = new_cache(quantize), deque(requests), 0, 0, 0
    running: dict[int, tuple[Request, int]] = {}  # by name: the request, and its tokens in the cache
    task = show.add_task(f"cache {quantize or 'fp32'}", total=sum(request.count for request in requests))
    while waiting or running:
        while waiting and len(running) < SLOTS and cache.free_pages > len(running):
            request = waiting.popleft()
            known = cache.match(request.prompt + request.new, request.name)
            running[request.name] = request, known
            reused += known
        pieces: OrderedDict[int, list[int]] = OrderedDict()
        left = STEP_TOKENS
        for name, (request, done) in running.items():  # a step has room for one token of each, and pieces of prompts
            text = request.prompt + request.new
            pieces[name] = text[done : done + max(1, min(left, len(text) - done))]
            left -= len(pieces[name])
        try:
            cache.pre_step(OrderedDict((name, len(piece)) for name, piece in pieces.items()))
        except CacheFullError:  # nothing has changed
            name, (request, _) = running.popitem()
            cache.free(name)
            waiting.appendleft(request)
            restarts += 1
            continue
        lengths = torch.tensor([len(piece) for piece in pieces.values()])
        tokens = torch.tensor([token for piece in pieces.values() for token in piece])
        following = model(tokens, cache, lengths.cumsum(0) - 1).argmax(-1).tolist()
        for (name, piece), token in zip(pieces.items(), following, strict=True):
            request, done = running[name]
            running[name] = request, done + len(piece)
            if done + len(piece) < len(request.prompt) + len(request.new):
                continue  # the rest of its prompt comes in the next step
            if not request.new:
                cache.remember(request.prompt, name)
            request.new.append(token)
            show.advance(task)
            if len(request.new) == request.count:
                del running[name]
                cache.free(name)
        steps += 1
    return steps, reused, restarts, str(cache.memory)


def alone(model: Decoder, request: Request) -> list[int]:
    """The tokens of a request that is served by itself."""
    cache, new = new_cache(), list(request.prompt)
    found: list[int] = []
    while len(found) < request.count:
        cache.pre_step(OrderedDict({request.name: len(new)}))
        new = [int(model(torch.tensor(new), cache, torch.tensor([len(new) - 1])).argmax())]
        found += new
    return found


def requests() -> list[Request]:
    make = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=make).tolist()

    systems = [draw(70), draw(45)]  # two beginnings that most prompts share
    lengths = torch.randint(3, 60, (64,), generator=make).tolist()
    counts = torch.randint(4, 17, (64,), generator=make).tolist()
    prompts = [(systems[n % 3] if n % 3 < 2 else []) + draw(length) for n, length in enumerate(lengths)]
    return [Request(n, prompt, count) for n, (prompt, count) in enumerate(zip(prompts, counts, strict=True))]


model = Decoder().eval()
with torch.inference_mode(), Progress(transient=True) as progress:
    expected = [alone(model, request) for request in requests()]
    for quantize in (None, "int8"):
        batch = requests()
        start = time.perf_counter()
        steps, reused, restarts, memory = serve(model, batch, quantize, progress)
        rate = sum(request.count for request in batch) / (time.perf_counter() - start)
        equal = sum(request.new == tokens for request, tokens in zip(batch, expected, strict=True))
        progress.console.print(f"cache {quantize or 'fp32'}: {steps} steps, {rate:.0f} tokens/s; {memory}")
        progress.console.print(
            f"  {reused} cached tokens reused, {restarts} restarts; {equal} of 64 texts equal to those alone"
        )
        if quantize is None:
            assert equal >= 60, "only tokens whose logits tie within rounding may differ"
