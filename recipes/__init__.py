"""Recipes: each answers one question about training on a GPU; see README.md in this folder."""
