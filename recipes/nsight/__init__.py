"""What nsight_questions does: the captures that it makes, what it reads out of them, the answers."""
