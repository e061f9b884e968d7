"""Running a call.

prepare             request -> call and decision
autograd            running a backend, and derivatives of every order
batches             gradients of a batch of incoming gradients
dispatch            calls that torch.compile, a dispatch mode, a tensor subclass or other ranks see first
compile             the operator for such calls
operator_arguments  its arguments
onnx_export         operations of ONNX in its place, for torch.onnx.export
flop_counter        the operator's formulas for PyTorch's FlopCounterMode
shared_masks        one mask for all operators of a graph
dtensors            what a rank holds of DTensors, and how its result is placed
replay              a prepared call again, with other tensors
repeated_sdpa       such calls of scaled_dot_product_attention
sdpa_errors         the errors of PyTorch's scaled_dot_product_attention
"""
