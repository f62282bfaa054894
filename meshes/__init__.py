"""Device meshes with named axes, and how logical axes of arrays map to them."""

from meshes.mesh import AXES, build_mesh
from meshes.rules import RULES, partition_spec, sharding

__all__ = ["AXES", "RULES", "build_mesh", "partition_spec", "sharding"]
