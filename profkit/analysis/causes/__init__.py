"""What keeps a step slow or a peak high: a table of causes, one function a row, and the changes that remove them."""
