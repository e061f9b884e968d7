"""Running a call: preparation, autograd, and the operator that torch.compile and dispatch modes see."""
