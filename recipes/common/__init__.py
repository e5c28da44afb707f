"""What the recipes share: a grid of cells that resumes, a process for each, results that are whole or not there."""
