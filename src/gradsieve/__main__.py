"""`python -m gradsieve`, for torchrun, mpirun and srun."""

from gradsieve.cli import main

if __name__ == "__main__":
    main()
