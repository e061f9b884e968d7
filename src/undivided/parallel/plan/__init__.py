"""Meshes for training: bytes per link, memory per rank and the longest sequence, counted before a cluster is rented.

model     sizes, parameters           traffic   bytes that each axis sends
cluster   nodes, links, units         memory    bytes that a rank holds
search    all meshes, the best one
"""

from undivided.parallel.plan.cluster import Cluster, bytes_in, bytes_per_second
from undivided.parallel.plan.memory import Bytes
from undivided.parallel.plan.model import PRESETS, Model
from undivided.parallel.plan.search import Axis, MeshOption, TrainingPlan, plan_training

__all__ = [
    "PRESETS",
    "Axis",
    "Bytes",
    "Cluster",
    "MeshOption",
    "Model",
    "TrainingPlan",
    "bytes_in",
    "bytes_per_second",
    "plan_training",
]
