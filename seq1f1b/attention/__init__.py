"""Functions for a model's modules: attention, positions, carried state, packed documents.

Begin with ``causal.py``: plain causal attention outside a step, attention over the KV cache inside a step. ``unit.py``
holds the unit running on a thread, ``carry.py`` hands state from a segment to the next segment.
"""
