"""What the processes of tests import, imported once: by the server that they are forked from.

torch imports `torch._dynamo` with the first optimizer, and pyarrow imports pandas with the first table: together they
take longer than a small training. So do scikit-learn, torchmetrics and hypothesis, which the tests' modules import: a
process imports the module that its job names.
"""

import gc

import hypothesis  # noqa: F401
import pandas  # noqa: F401
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401
import torchmetrics  # noqa: F401

import dp_ray.cli.main
import dp_ray.monitor.in_process  # noqa: F401
import tests.support.feeds
import tests.support.group
import tests.support.tables
import tests.support.training  # noqa: F401

gc.freeze()  # a forked process shares these objects' memory for as long as its collector leaves them alone
