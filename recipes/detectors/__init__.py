"""What a table of measurements gives away about how it was made: detectors of the mistakes that benchmarks carry.

`recipes.detectors.inspect` runs them all, on tables read from a file or made of a recipe's own rows.
"""
