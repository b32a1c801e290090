"""Training: data, loss, schedule, step, state and export of one job."""
