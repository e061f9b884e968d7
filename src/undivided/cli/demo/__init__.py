"""What ``undivided demo`` measures and prints: its documents, its batch, the comparison and the training."""
