"""The steps of one rank in each strategy: rounds of ring and all-gather, the row-for-head exchange of all-to-all."""
