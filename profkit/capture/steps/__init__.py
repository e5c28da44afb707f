"""Where steps begin and end, what they are called, and how long they and their phases take."""
