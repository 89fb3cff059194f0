"""How a program is started that a test will end by a signal, as a user at a terminal would."""

import signal


def hear_signals() -> None:
    """Before such a program begins (`preexec_fn`): it hears interrupts and terminations, whatever this process does."""
    # a child of a non-interactive shell inherits SIGINT ignored, and Dagster hands SIGTERM to SIGINT's handler
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
