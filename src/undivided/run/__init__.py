"""Running a call.

prepare             request -> call and decision
autograd            running a backend, and derivatives of every order
batches             gradients of a batch of incoming gradients
dispatch            calls that torch.compile, a dispatch mode, a tensor subclass or other ranks see first
compile             the operator for such calls
operator_arguments  its arguments
repeated_operator   what repeated calls of it keep
onnx_export         operations of ONNX in its place, for torch.onnx.export
flop_counter        the operator's formulas for PyTorch's FlopCounterMode
shared_masks        one mask for all operators of a graph
dtensors            what a rank holds of DTensors, and how its result is placed
replay              a prepared call again, with other tensors
large_scores        gradients of rows whose log-sum-exp does not determine the weights
sdpa                what only scaled_dot_product_attention needs
"""
