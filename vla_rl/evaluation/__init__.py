"""How good is a policy: evaluation, intervals, reports, comparisons, plots and videos."""
