"""Costs of a run: models, machines, profiles, the search for a plan, comparisons."""

from seq1f1b.planning import renamed as renamed
