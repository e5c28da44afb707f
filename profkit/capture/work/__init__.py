"""What operators compute and which bytes they touch, under the ranges that are open."""
