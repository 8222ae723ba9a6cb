"""PINA: a network that solves a differential equation. Needs pina-mathlab."""

import json

import torch
from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation, FixedValue
from pina.model import FeedForward
from pina.operator import grad
from pina.problem import SpatialProblem
from pina.solver import PINN

torch.manual_seed(0)


def residual(inputs, outputs):
    return grad(outputs, inputs, components=["u"], d=["x"]) - outputs.extract(["u"])


class Growth(SpatialProblem):
    output_variables = ["u"]  # noqa: RUF012 (PINA's way to say it)
    spatial_domain = CartesianDomain({"x": [0, 1]})
    domains = {"x0": CartesianDomain({"x": 0.0}), "D": CartesianDomain({"x": [0, 1]})}  # noqa: RUF012
    conditions = {  # noqa: RUF012
        "bound": Condition(domain="x0", equation=FixedValue(1.0)),
        "phys": Condition(domain="D", equation=Equation(residual)),
    }


problem = Growth()
problem.discretise_domain(1, "grid", domains=["x0"])
problem.discretise_domain(20, "grid", domains=["D"])
network = FeedForward(layers=[8, 8], func=torch.nn.Tanh, output_dimensions=1, input_dimensions=1)
quiet = {"accelerator": "cpu", "enable_model_summary": False, "enable_progress_bar": False}
trainer = Trainer(solver=PINN(problem, network), max_epochs=20, **quiet, train_size=1.0, val_size=0.0, test_size=0.0)
trainer.train()
print(json.dumps({"exact": {name: float(value) for name, value in trainer.logged_metrics.items()}}))
