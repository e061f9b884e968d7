"""Tensors, integers and layouts as callers give them, and the errors if they are wrong."""
