"""Code that several backends share: blocks of the score matrix, rules of cuDNN and flash-attn, adapters of GPU
kernels."""
