"""Attention in Triton: forward, decoding and backward from row ranges, for any mask, on any GPU that Triton serves.

    tile.py            what happens in one tile of scores: mask, bias, ALiBi, softcap, dropout, and where keys lie
    forward.py         output and log-sum-exp; decoding is the same kernel with grouped heads in the rows and split keys
    score_gradient.py  the gradient of one tile of scores, for all passes of the backward
    backward.py        dq; dk and dv; the gradient of the bias
    config.py          tile sizes per architecture

Importing this package imports nothing of Triton: `undivided.backends.triton` imports the kernels when they first run.
"""
