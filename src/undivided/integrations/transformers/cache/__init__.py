"""`Cache`: keys and values of a model, stored in place and quantised on request.

    _cache.py    the cache
    _layers.py   its layers, with all tokens or those of a window
    _states.py   quantised keys or values in place of the tensor that a layer gets

It is imported at first use, because its base class is part of transformers; `_states.py` imports nothing of it.
"""
