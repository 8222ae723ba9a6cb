"""Installed packages that build on Lightning, unchanged: their quick starts on made-up data.

None of them is a dependency of the tests; CONTRIBUTING.md explains how to install and try them.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import completed, run_module, run_script
from public_programs import PAGE, page, same

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "packages"
NEEDS = {
    "chemprop_mpnn": "chemprop",
    "choice_logit": "torch_choice",
    "darts_models": "darts",
    "deeptab_models": "deeptab",
    "dowhy_environments": "dowhy",
    "drvi_model": "drvi",
    "forecasting_tft": "pytorch_forecasting",
    "geometric_gcn": "torch_geometric",
    "gluonts_estimators": "gluonts",
    "gmm_mixtures": "torchgmm",
    "harness_faults": "torch_harness",
    "lifestream_coles": "ptls",
    "lightly_simclr": "lightly",
    "lightning_demos": "lightning",
    "nam_linear": "nam",
    "neuralforecast_models": "neuralforecast",
    "opacus_private_training": "opacus",
    "pina_pinn": "pina",
    "rectools_sasrec": "rectools",
    "scvi_vae": "scvi",
    "tabular": "pytorch_tabular",
    "torchdyn_ode": "torchdyn",
    "uncertainty_classification": "torch_uncertainty",
    "uqbox_methods": "lightning_uq_box",
}
"""The package that each script needs."""


def run(folder, *called):
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "NIXTLA_ID_AS_COL": "1"}
    done = completed(*called, cwd=folder, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_page_has_the_packages_that_were_tried():
    assert PAGE.read_text() == page(), "python tests/public_programs.py --page"


def test_each_script_is_listed():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_a_package_runs_unchanged(tmp_path, name):
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    script = str(SCRIPTS / f"{name}.py")
    ours = run(tmp_path / "legato", run_module, "legato", "lightning", script)
    theirs = run(tmp_path / "lightning", run_script, script)
    assert ours.keys() == theirs.keys()
    assert same(theirs.get("exact", {}), ours.get("exact", {})), (theirs, ours)
