"""What happens to a federation's data once, before the first round."""
