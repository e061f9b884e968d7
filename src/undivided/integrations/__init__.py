"""Undivided under other libraries' own names: PyTorch's function (`torch_sdpa`) and model libraries, one file each."""
