"""Steps of rows: micro-batches of their own lengths, whose segments may be trees.

Begin with ``rows.py``: the segments' order, the tokens of a path, and the rules of both. Packed documents within a row
belong to attention (``attention/packing.py``); the planner makes rows from a step's documents.
"""
