"""Plans in processes of this machine: ranks, emulated pace, shaped links."""
