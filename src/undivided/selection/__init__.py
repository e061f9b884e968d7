"""Which backend runs.

policy     what the caller allows        switches   what PyTorch's own switches allow
decision   the choice, and the reasons   log        its log records
order      default ranks                 measured   measured ranks
"""
