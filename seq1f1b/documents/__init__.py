"""Steps of rows: micro-batches of their own lengths, whose segments may be trees.

Begin with ``rows.py``: which segment follows which, which tokens a path holds, and the rules of both. Packed documents
within a row are attention's (``attention/packing.py``); how a step's documents become rows is the planner's.
"""
