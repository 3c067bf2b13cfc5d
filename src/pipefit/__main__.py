"""`python -m pipefit`, the same as the `pipefit` command; torchrun starts it in this form."""

from pipefit.cli import main

if __name__ == "__main__":
    main()
