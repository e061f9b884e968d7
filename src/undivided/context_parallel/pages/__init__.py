"""Pages of caches over ranks: page p of every sequence is on rank ``p % world``."""
