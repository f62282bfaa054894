"""One folder per operation: what it means (`reference`), a portable version (`xla`), the choice (`api`)."""
