"""Comparisons by values: does a pipeline compute the whole model's numbers?

Begin with ``verify.py``: it runs pipeline and model on one batch and compares losses, outputs and gradients. In the
first step of a shape, ``first_look.py`` compares a stage in two segments and in one, and ``loss_look.py`` a loss.
The engine loads these modules by name (``seq1f1b/above.py``) and imports none of them.
"""
