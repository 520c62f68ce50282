"""Recipes: from a model, a goal and the memory to settings, with the reason and the source of each."""
