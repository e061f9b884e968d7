"""Undivided behind the interfaces of other libraries: PyTorch's function (`torch_sdpa`), Hugging Face Transformers."""
