"""Parameters of other projects for models of undivided's layers, and back, by one table of names.

table.py    the names of a layer here and in TransformerEngine, and in Hugging Face Transformers
fused.py    queries, keys and values in one weight, in TransformerEngine's two orders
convert.py  `from_hugging_face`, `to_hugging_face`, `from_transformer_engine`
check.py    names and sizes of a result
"""

from undivided.integrations.checkpoints.convert import from_hugging_face, from_transformer_engine, to_hugging_face
from undivided.integrations.checkpoints.table import NAMES

__all__ = ["NAMES", "from_hugging_face", "from_transformer_engine", "to_hugging_face"]
