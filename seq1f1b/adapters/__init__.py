"""Interfaces to torch.distributed.pipelining, torch's checkpoints, and models cut into stages.

Begin with ``chain.py``, :func:`seq1f1b.split`, or with ``pipelining.py``, a drop-in for torch's schedules.
"""
