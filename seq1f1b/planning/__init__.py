"""Costs of a run: models, machines, profiles, the search for a plan, comparisons."""

from seq1f1b.renamed import watch_old_paths

watch_old_paths()
