"""What attention_sweep measures: ways to write attention, their time, and their memory tensor by tensor."""
