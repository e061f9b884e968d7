"""Ledgers: where every token is stored, as lengths, pages and reference counts on the host, without tensors.

One ledger serves all layers, because they hold the same tokens. `plan` reserves memory and changes nothing, so that a
refused request has no effect. Tokens are written to the rows of the plan, then `commit` applies it.
"""
