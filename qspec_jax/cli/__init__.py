"""The entry point of the command line. Bad input ends with one line on standard error and exit code 2.

The commands are in `qspec_jax.cli.app`, which takes seconds to import: only once signals are taken care of.
"""

import os
import sys

from qspec_jax.cli import process

# Modules of which no messages of the level INFO are shown.
QUIET = (
    "decoding.ahead",  # what could not be compiled ahead is compiled when it is needed
    "training.corpus",  # which files of the corpus are left out
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits.

    The exit code is 0; 2 for bad input; 1 if `verify` finds a difference or the GPU fails; 130 after Ctrl-C, 143 after SIGTERM, and 141
    if the reader of standard output has left.

    Args:
        arguments: of the command; None: those of the process.
    """
    own = arguments is None
    if own:
        process.begin()
    import contextlib
    import logging

    from qspec_jax.errors import InputError, is_out_of_memory, more_memory

    logging.basicConfig(format="qspec: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("qspec_jax").setLevel(logging.INFO)
    for module in QUIET:
        logging.getLogger(f"qspec_jax.{module}").setLevel(logging.WARNING)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # which warns of what a task leaves to defaults
    try:
        code = _run(sys.argv[1:] if own else list(arguments), own)
        sys.stdout.flush()
        if own and not code:
            process.finish()
    except InputError as error:
        code = _fail(str(error))
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        of_jax = type(error).__name__ == "JaxRuntimeError"  # which may not be imported yet
        if of_jax and is_out_of_memory(error):
            code = _fail(f"the device's memory is too small for this; `qspec doctor` and `qspec plan` say what fits{more_memory()}")
        elif of_jax and "CUDA_ERROR" in str(error):
            code = _fail(f"the GPU ended a kernel with an error, and with it this run: {str(error).splitlines()[0]}", 1)
        elif of_jax and (library := next((name for name in ("NCCL", "Gloo") if name.lower() in str(error).lower()), None)):
            reason = str(error).splitlines()[0]
            code = _fail(f"{library}, through which devices talk to each other, is missing or has lost one of them: {reason}", 1)
        # typer's own errors (unknown flags, bad values) in every version of typer: with click beside it or inside it.
        elif not hasattr(error, "format_message"):
            raise
        elif type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message(), file=sys.stderr)
            code = 2
        else:
            message = _message(error)
            code = _fail(message) if message else 2
    if code == 130:  # typer's for both signals
        code = process.interrupted()
    if code and own:
        # Threads of XLA and TensorStore may be at work still: Python would wait for them, report their errors, or crash.
        with contextlib.suppress(InputError, SystemExit):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code or 0)


def _run(arguments: list[str], own: bool) -> int | None:
    if arguments == ["--version"]:
        print(process.version())
        return 0
    import gc

    if own:
        gc.disable()  # to look through what is imported, which stays, takes a tenth of the time
    from qspec_jax.cli.app import app

    if own:
        gc.freeze()
        gc.enable()
        process.raise_on_signals()
    return app(args=arguments, prog_name="qspec", standalone_mode=False)


# What a value should be, by pydantic's name of the reason why it refuses another.
SHOULD_BE = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


def _message(error: Exception) -> str:
    """The message of an error of typer's. Of a number that pydantic refuses, typer itself does not say which it was."""
    cause = error.__cause__
    refused = cause.errors()[0] if hasattr(cause, "errors") else {"type": None}
    if refused["type"] not in SHOULD_BE:
        return error.format_message().replace(": Value error, ", ": ")  # what pydantic puts before what others say
    should_be = SHOULD_BE[refused["type"]].format(**refused.get("ctx", {}))
    return f"{error.param.opts[0]} {refused['input']} should be {should_be}"


def _fail(message: str, code: int = 2) -> int:
    from qspec_jax.errors import flat

    print(f"qspec: error: {flat(message)}\n", end="", file=sys.stderr)  # in one piece: Gloo writes lines of its own there
    return code
