"""`python -m jaxinfer`: the command line, where its script is not on the PATH."""

from jaxinfer.cli import main

if __name__ == "__main__":
    main()
