"""Processes of a campaign, forked from one that has imported torch; learners' code runs in them."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

CONTEXT = multiprocessing.get_context("forkserver")
# Each training's first optimizer would import torch._dynamo, for a second.
CONTEXT.set_forkserver_preload(["distlab.chaos.victim", "torch._dynamo"])

Result = TypeVar("Result")
Advance = Callable[[], None]


class CampaignError(Exception):
    """A campaign cannot go on; one line, and the traceback of a process where there is one."""


def call(function: Callable[..., Result], *arguments: Any, advance: Advance) -> Result:
    """Call a function in a process of its own, with one more argument: what it calls to advance.

    Raises:
        CampaignError: it has raised, or its process has ended.
    """
    listener, teller = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_call, args=(function, arguments, teller), daemon=True)
    process.start()
    teller.close()
    try:
        while True:
            what, value = listener.recv()
            if what == "advance":
                advance()
            elif what == "raised":
                raise CampaignError(value)
            else:
                result: Result = value
                return result
    except EOFError:
        raise CampaignError(f"{function.__name__}: its process has ended") from None
    finally:
        process.kill()
        process.join()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], teller: Connection) -> None:
    try:
        teller.send(("returned", function(*arguments, lambda: teller.send(("advance", None)))))
    except Exception as error:
        teller.send(("raised", f"{type(error).__name__}: {error}"))
