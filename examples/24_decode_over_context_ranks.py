"""A long context over four ranks: the prompt is computed in parts, its keys stay on the ranks, tokens are decoded.

    python examples/24_decode_over_context_ranks.py [--tokens 6000]      # starts four processes, over gloo

A model of two layers reads a prompt and continues it greedily, once in one process and once over the ranks of a
context. Page p of the cache is on rank p % 4. In the prompt's steps each rank has a quarter of the tokens; in the
others every rank has the new tokens and attends to its own pages. Two continuations share the pages of the prompt.
"""

import argparse
import os
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

import undivided
from undivided import InferenceParams, RotaryPositionEmbedding, TransformerLayer

RANKS, PAGE, WORDS, HIDDEN, HEADS, KV_HEADS, SIZE, NEW, CHUNK = 4, 64, 256, 128, 8, 2, 16, 12, 2048


class Model(torch.nn.Module):
    """Embeddings, two layers, logits."""

    def __init__(self):
        super().__init__()
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(HIDDEN, 256, HEADS, num_gqa_groups=KV_HEADS, layer_number=n, **options) for n in (1, 2)
        )
        self.head = torch.nn.Linear(HIDDEN, WORDS)
        self.rotary = RotaryPositionEmbedding(SIZE)

    def forward(self, tokens, caches):
        """The logits of the last token of each sequence. In a sharded step, tokens are those of this rank."""
        x, angles = self.embedding(tokens), self.rotary(caches.max_sequence_length)
        for layer in self.layers:
            x = layer(x, inference_params=caches, rotary_pos_emb=angles)
        x = caches.unshard(x) if caches.sharded_length else x
        return self.head(x[:, -1])


@torch.no_grad()
def generate(prompt, context=None):
    """Tokens and logits of two continuations of the prompt, and the bytes of this process's caches."""
    torch.manual_seed(0)
    model = Model().eval()
    for layer in model.layers:
        layer.set_context_parallel_group(context)
    pool = {"is_paged": True, "page_size": PAGE, "context_parallel": context}
    caches = InferenceParams(2, prompt.shape[1] + NEW, KV_HEADS, SIZE, torch.float32, **pool)
    for chunk in prompt.split(CHUNK, 1):  # a chunk at a time, because a layer gathers the queries of its ranks
        caches.pre_step(OrderedDict(first=chunk.shape[1]), sharded=context is not None)
        logits = model(caches.shard(chunk) if context else chunk, caches)
    caches.fork("first", "second")  # the pages of the prompt are shared
    tokens = [logits.topk(2).indices.view(2, 1)]
    found = []
    for _ in range(NEW):
        caches.pre_step(OrderedDict(first=1, second=1))
        found.append(model(tokens[-1], caches))
        tokens.append(found[-1].argmax(-1, keepdim=True))
    return torch.cat(tokens, 1).tolist(), torch.stack(found), caches.memory.values


def rank_main(rank, store, length):
    """What each process does."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    prompt = torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(1))
    tokens, logits, memory = generate(prompt, undivided.ContextParallel())
    answers = [None] * RANKS
    dist.all_gather_object(answers, (tokens, memory))
    if rank == 0:
        alone, right, whole = generate(prompt)
        print(f"A prompt of {length} tokens. Keys and values in MiB: {whole / 2**20:.2f} in one process;")
        print(f"{', '.join(f'{memory / 2**20:.2f}' for _, memory in answers)} on the ranks.")
        print("One process:", *alone, sep="\n  ")
        same = sum(found == alone for found, _ in answers)
        largest = float((logits - right).abs().max() / right.abs().max())
        print(f"The same tokens on {same} of {RANKS} ranks; the logits differ by {largest:.0e} of the largest.")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (f"{folder}/store", parser.parse_args().tokens), nprocs=RANKS)
