"""One rank's part of a training step: the engine, its stages, and what surrounds their units.

Begin with ``engine.py``, the public class. ``runner.py`` runs a step: ``batch.py`` cuts what it was given, the C
executor calls ``stage.py`` for F and B of each unit, ``ends.py`` and ``loss.py`` take outputs on, and ``gradients.py``
adds up. A feature is a file with a :class:`Part` (``parts.py``): recomputation, offload, split backward.
"""
