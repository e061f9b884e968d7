"""What one rank does in each strategy: the rounds of ring and all-gather, the trade of rows for heads of all-to-all."""
