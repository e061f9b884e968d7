"""The blocks of the layers: linear maps, normalisations, the feed-forward block, and their base class."""
