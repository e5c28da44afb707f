"""Recipes: each answers one question about training on a GPU, checked against arithmetic; see README.md beside this."""
