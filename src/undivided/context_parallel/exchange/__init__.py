"""How ranks exchange tensors: process groups, simulated ranks, and the check that all ranks make the same call."""
