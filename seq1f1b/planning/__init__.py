"""What a run will cost: models, machines, profiles, the search for a plan, comparisons."""
