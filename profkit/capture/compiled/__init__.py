"""Code that torch.compile generates: what each of its launches comes from, and a range around it while it runs."""
