"""The blocks that the layers are made of: linear maps, normalisations, the feed-forward block, and their base class."""
