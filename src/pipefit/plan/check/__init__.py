"""The rules of a valid plan. `check_plan` raises the first error."""
