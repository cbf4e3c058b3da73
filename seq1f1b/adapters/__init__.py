"""Other people's interfaces: torch's pipelining and checkpoints, and models that are cut into stages.

Begin with ``chain.py``, :func:`seq1f1b.split`, or with ``pipelining.py``, a drop-in for torch's schedules.
"""
