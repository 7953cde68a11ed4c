"""Recipes: YAML plus overrides -> `RunConfig`, every mistake told in one line."""

from leadout.recipe.load import dump, load_recipe, parse

__all__ = ["dump", "load_recipe", "parse"]
