"""Measured steps: the report of a rank and of a pipeline, why ranks were idle, and orders that are tuned by it.

Begin with ``report.py``, the figures of the last step. ``idle.py`` finds the cause of each second in which a rank ran
no unit. ``tuning.py`` tries orders while the engine trains. The engine asks for these by name (``seq1f1b/above.py``).
"""
