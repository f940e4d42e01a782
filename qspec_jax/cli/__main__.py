"""`python -m qspec_jax.cli`, for a checkout that is not installed."""

from qspec_jax.cli import main

if __name__ == "__main__":
    main()
