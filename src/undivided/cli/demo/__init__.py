"""What ``undivided demo`` measures and prints.

    documents       files of Python's library, the documents of the demo
    batch           the documents as queries, keys and values, packed and padded
    comparison      several ways to compute the attention, compared with an oracle and timed
    training_step   one training step on the same documents, packed and padded
    text, charts    the printed output, and the pictures of ``--out``

With ``--train``, a second part follows:

    byte_model      a small language model of bytes, built from the layers of this library
    byte_training   its training on packed documents, with checkpoints
    training        runs and reports the training, and generates text
"""
