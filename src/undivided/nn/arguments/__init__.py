"""The arguments of the modules: which values are accepted, and what they mean as masks, biases and formats."""
