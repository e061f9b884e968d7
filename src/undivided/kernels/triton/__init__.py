"""Attention in Triton: forward, decoding and backward from row ranges, for any mask, on any GPU that Triton supports.

    tile.py            one tile of scores: mask, bias, ALiBi, softcap, dropout, and loads of rows and keys
    key_ranges.py      which keys the rows of a block attend to: ranges of rows, runs of tiles
    quantized.py       loads of keys and values in 8 or 4 bits
    words.py           loads of the same as 16-bit words
    parts.py           products with tiles of words, a part of each word at a time
    forward.py         output and log-sum-exp; decoding is the same kernel with grouped heads in the rows and split-KV
    score_gradient.py  the gradient of one tile of scores, for all passes of the backward
    backward.py        dq; dk and dv; the gradient of the bias
    config.py          tile sizes per architecture

Importing this package does not import Triton: `undivided.backends.triton` imports the kernels when they first run.
"""
