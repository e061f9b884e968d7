"""A request: what the caller wrote, what it needs of a backend, and what a backend returns.

request    the tensors and options       problem    what selection sees of them
checks     of every argument             normalise  request -> call
call       what a backend is called with result     what it returns, and how parts are merged
slopes     the usual ALiBi slopes           foreign    hints for keywords of other libraries
"""
