"""`legato plan`: reads the options, makes the plan and prints it."""

from collections.abc import Sequence

from ...base.errors import DataError
from .plan import render, render_batches, shown_count
from .sources import PlanArguments, make_plan


def run_plan(arguments: Sequence[str]) -> None:
    """Print the plan for a command line. Raises DataError if an epoch has no step."""
    options, rest = PlanArguments.read(arguments)
    plan = make_plan(options, rest)
    asked = (options.rank, options.step, options.epoch)
    parts = [render(plan)]
    if any(number is not None for number in asked):
        parts.append(render_batches(plan, *(number or 0 for number in asked)))
    print("\n\n".join(parts))
    if plan.deal.steps == 0:
        dropped = ", the short last one dropped," if plan.drop_last else ""
        limit = "" if plan.limit == 1.0 else f", with limit_train_batches={plan.limit}"
        raise DataError(
            f"fit refuses this run, since an epoch has no step: {shown_count(plan.length, plan.unit)} in batches of "
            f"{plan.batch_size:,}{dropped} for {shown_count(plan.replicas, 'replica')}{limit}."
        )
