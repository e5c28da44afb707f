"""Builders of small captures for the awkward cases, shared by the tests."""
