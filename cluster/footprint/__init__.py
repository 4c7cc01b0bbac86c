"""What one rank of a training job keeps in memory, sends and computes in a step."""
