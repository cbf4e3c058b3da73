"""Measured steps: the reports of a rank and of a pipeline, causes of idle time, and orders tuned by measurements.

Begin with ``report.py``, the figures of the last step. ``idle.py`` finds the cause of each second in which a rank ran
no unit. ``tuning.py`` tries orders while the engine trains. The engine imports both by name (``seq1f1b/above.py``).
"""
