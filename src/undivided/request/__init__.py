"""A request: the arguments of the caller, the problem that they pose to a backend, and the result of a backend.

request    the tensors and options       problem    what selection reads of them
checks     the checks of every argument  normalise  request -> call
call       the argument of a backend     result      what a backend returns, and how partial results are merged
slopes     the usual ALiBi slopes        quantized   the checks of quantised keys and values
seed       how seeds are drawn and checked
foreign    hints for keywords of other libraries
flops      the floating-point operations of a call
"""
