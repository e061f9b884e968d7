"""What several backends share: blocks of the score matrix, rules of cuDNN and flash-attn, tensors on a GPU."""
