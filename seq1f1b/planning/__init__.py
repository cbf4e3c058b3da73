"""Costs of a run: models, machines, profiles, the search for a plan, comparisons of schedules."""
