"""What only `scaled_dot_product_attention` needs.

masks     attn_mask as a mask or a bias
jagged    jagged nested tensors as packed tokens
repeated  calls like an earlier one
errors    PyTorch's errors
"""
