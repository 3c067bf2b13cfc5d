"""The rules that a valid plan obeys. `check_plan` raises the first breach."""
