"""Functions that a model calls inside its modules: attention, positions, carried state, packed documents.

Begin with ``causal.py``: plain causal attention outside a step, attention over the KV cache inside a step. ``unit.py``
is the unit that runs on this thread, ``carry.py`` hands state from a segment to the next one.
"""
