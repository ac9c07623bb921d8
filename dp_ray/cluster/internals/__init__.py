"""Every private interface of Ray that dp_ray uses, here and nowhere else.

Private means not documented by Ray: modules and names with an underscore, `ray.train.v2`, `ray.core.generated`,
names of its classes and texts of its messages, and its environment variables, a few of which are documented.
Each item says what it is for and, after "Public:", which public interface could replace it.
`tests/cluster/test_ray_internals.py` checks by name that Ray still has them; docs/contributing/ray.md says how to
try a new Ray.

Every worker imports these modules, so slow imports, such as grpc, are inside the functions that need them.
"""

from dp_ray.cluster.ray_version import check_ray

check_ray()  # before any module of this package imports Ray
