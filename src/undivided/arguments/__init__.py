"""Checks of tensors, integers and layouts from callers."""
