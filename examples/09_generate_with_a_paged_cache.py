"""Text generated from a paged cache: a common prefix is in memory once, and sequences start and end at any time.

The "model" is one attention head that copies: its keys encode the preceding characters, its values the character that
followed, so a query that ends in "ter than " finds what followed those letters elsewhere in the text. It is not
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
CONTEXT = 6  # the number of preceding characters that a key encodes
ALPHABET = sorted(set(TEXT))
generator = torch.Generator().manual_seed(0)
of_character = torch.randn(CONTEXT, len(ALPHABET), 128, generator=generator) / 128**0.5
nearer_counts_more = torch.linspace(1.4, 0.6, CONTEXT)


def before(text: str, start: int) -> torch.Tensor:
    """The context before each character from `start` on, and before the next one: [n + 1, 1, 128]."""
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
    """The scores of the next character, [slots, alphabet], after the new characters of each slot were appended."""
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
    out = cache.attend(queries, scale=6.0)[:, :, 0]  # one row per new character; the last one of each slot is used
    return torch.stack([out[slot, max(length - 1, 0)] for slot, length in enumerate(lengths)])


cache = PagedKVCache(PAGES, PAGE, kv_heads=1, head_dim=128, value_dim=len(ALPHABET), batch=SLOTS, dtype=torch.float32)
read(cache, {0: (TEXT, 0)})  # slot 0 keeps the text with which all others start
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
writing: dict[int, str] = {}  # slot -> the text after the common prefix
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
        likely = expected[slot].clamp(min=0).square()  # sharper than the attention weights
        writing[slot] += ALPHABET[int(torch.multinomial(likely, 1, generator=generator))]
        # A line is complete: the sequence ends, and its pages are free.
        if writing[slot].count("\n") > 1 or len(writing[slot]) > 90:
            print(f"  slot {slot}: {writing.pop(slot).strip()}")
            cache.free(slot)

apart = SLOTS * -(-len(TEXT) // PAGE)
print(f"\n{steps} steps, {SLOTS} sequences at a time on at most {most} pages; without sharing they would take {apart}.")

try:
    cache.append(torch.zeros(SLOTS, 400, 1, 128), torch.zeros(SLOTS, 400, 1, len(ALPHABET)))
except InputError as error:
    print(f"\nAn append that does not fit is refused, and nothing has changed:\n{error}")
assert cache.lengths == (len(TEXT), 0, 0, 0)
