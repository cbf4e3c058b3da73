"""Steps of rows: micro-batches of unequal lengths, or with trees of segments.

Begin with ``rows.py``: the segments' order, the tokens of a path, and the rules of both. Packed documents within a row
belong to attention (``attention/packing.py``); the planner makes rows from a step's documents.
"""
