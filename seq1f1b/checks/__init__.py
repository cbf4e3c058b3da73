"""Comparisons by values: does a pipeline compute what the whole model does?

Begin with ``verify.py``, which runs both on one batch and compares losses, outputs and gradients. ``first_look.py``
runs a stage on a few tokens in the first step of a shape, as one segment and as two; ``loss_look.py`` a loss.
The engine asks for these by name (``seq1f1b/above.py``), and knows none of them.
"""
