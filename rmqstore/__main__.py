"""``python -m rmqstore`` is the command ``rmqstore``.  Owns nothing."""

from rmqstore.cli import main

if __name__ == "__main__":
    main(prog_name="rmqstore")
