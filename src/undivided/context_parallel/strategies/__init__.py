"""The steps of one rank in each strategy: rounds for ring and all-gather, the exchange of rows for heads for all-to-all."""
