"""Text generated from a paged cache: what all sequences have read lies in memory once, and they come and go.

The "model" is one attention head that copies: its keys say which characters came before, its values say which character
came then, so a query that ends in "ter than " finds what followed those letters elsewhere in the text. Nothing is
trained.
"""

import codecs
import contextlib
import io

import torch

from undivided import InputError, PagedKVCache

with contextlib.redirect_stdout(io.StringIO()):
    import this  # the Zen of Python, 19 aphorisms in ROT13
TEXT = codecs.decode(this.s, "rot13")

PAGE, PAGES, SLOTS = 16, 72, 4
CONTEXT = 6  # characters that a key looks back
ALPHABET = sorted(set(TEXT))
generator = torch.Generator().manual_seed(0)
of_character = torch.randn(CONTEXT, len(ALPHABET), 128, generator=generator) / 128**0.5
nearer_counts_more = torch.linspace(1.4, 0.6, CONTEXT)


def before(text: str, start: int) -> torch.Tensor:
    """For each character from `start` on, and the one that is still to come, what stands before it: [n + 1, 1, 128]."""
    rows = []
    for at in range(start, len(text) + 1):
        seen = text[max(0, at - CONTEXT) : at][::-1]
        rows.append(
            sum(
                (nearer_counts_more[n] * of_character[n, ALPHABET.index(c)] for n, c in enumerate(seen)),
                torch.zeros(128),
            )
        )
    return torch.stack(rows).unsqueeze(1)


def read(cache: PagedKVCache, new: dict[int, tuple[str, int]]) -> torch.Tensor:
    """Append the characters of each slot's text from a place on; give what is expected next, [slots, alphabet]."""
    lengths = [len(text) - start if text else 0 for text, start in (new.get(slot, ("", 0)) for slot in range(SLOTS))]
    keys = torch.zeros(SLOTS, max(lengths), 1, 128)
    values = torch.zeros(SLOTS, max(lengths), 1, len(ALPHABET))
    queries = torch.zeros(SLOTS, max(lengths), 1, 128)
    for slot, (text, start) in new.items():
        around = before(text, start)
        keys[slot, : lengths[slot]], queries[slot, : lengths[slot]] = around[:-1], around[1:]
        for row, character in enumerate(text[start:]):
            values[slot, row, 0, ALPHABET.index(character)] = 1
    cache.append(keys, values, lengths=lengths)
    out = cache.attend(queries, scale=6.0)[:, :, 0]  # of every new character; the last one of each slot is what we want
    return torch.stack([out[slot, max(length - 1, 0)] for slot, length in enumerate(lengths)])


cache = PagedKVCache(PAGES, PAGE, kv_heads=1, head_dim=128, value_dim=len(ALPHABET), batch=SLOTS, dtype=torch.float32)
read(cache, {0: (TEXT, 0)})  # slot 0 keeps the text that all others begin with
print(
    f"The text: {len(TEXT)} characters on {PAGES - cache.free_pages} pages of {PAGE}. "
    f"{cache.free_pages} pages are free.\n"
)

waiting = [
    "\nNow is ",
    "\nSimple is ",
    "\nErrors ",
    "\nThere should ",
    "\nIf the ",
    "\nReadability ",
    "\nNamespaces ",
    "\nBut ",
]
writing: dict[int, str] = {}  # slot -> what it has of its own
most = steps = 0
while waiting or writing:
    new = {slot: (TEXT + text, len(TEXT) + len(text) - 1) for slot, text in writing.items()}
    for slot in set(range(1, SLOTS)) - set(writing):
        if waiting:
            writing[slot] = waiting.pop(0)
            cache.fork(0, slot)  # shares every page of the text
            new[slot] = (TEXT + writing[slot], len(TEXT))
    expected = read(cache, new)
    most, steps = max(most, PAGES - cache.free_pages), steps + 1
    for slot in list(writing):
        likely = expected[slot].clamp(min=0).square()  # a little bolder than the attention weights
        writing[slot] += ALPHABET[int(torch.multinomial(likely, 1, generator=generator))]
        if (
            writing[slot].count("\n") > 1 or len(writing[slot]) > 90
        ):  # a line is full: the sequence leaves, its pages are free
            print(f"  slot {slot}: {writing.pop(slot).strip()}")
            cache.free(slot)

apart = SLOTS * -(-len(TEXT) // PAGE)
print(
    f"\n{steps} steps, {SLOTS} sequences at a time on at most {most} pages; each with the text to "
    f"itself would take {apart}."
)

try:
    cache.append(torch.zeros(SLOTS, 400, 1, 128), torch.zeros(SLOTS, 400, 1, len(ALPHABET)))
except InputError as error:
    print(f"\nToo much is refused, and nothing has changed:\n{error}")
assert cache.lengths == (len(TEXT), 0, 0, 0)
