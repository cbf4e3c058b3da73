"""The engine of one rank: its stages, a training step, and the features around the units of a step.

Begin with ``engine.py``, the public class. ``runner.py`` runs a step: ``batch.py`` cuts the arguments into segments,
the C executor calls ``stage.py`` for F and B of each unit, ``loss.py`` takes the last outputs on, and
``gradients.py`` adds gradients up. A feature (recomputation, offload, split backward) is a file with a
:class:`Feature` (``stage.py``).
"""
