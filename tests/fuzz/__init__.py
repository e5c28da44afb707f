"""Files that somebody damaged or made to harm, by the thousand: each is read in a child process within limits.

A mutant is a good small file with some things changed, and it is known by its class and its seed: the same two give the
same file. ``python -m tests.fuzz --count 50000`` reads many and counts what became of them; a seed that fails is to
become a test with a name. What counts as a failure stands in `tests.fuzz.judge`.
"""
