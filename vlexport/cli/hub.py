"""`push` and `pull`: bundles in model repositories."""

from __future__ import annotations

import shlex
from pathlib import Path

from vlexport.cli.options import BUNDLE, BUNDLES_DIR, JSON, argument
from vlexport.cli.output import print_line, show, show_json
from vlexport.cli.progress import phases


def push(
    bundle: Path = BUNDLE,
    target: str = argument("TARGET", "org/name on the Hub, or a local directory."),
    as_json: bool = JSON,
) -> None:
    """Put a bundle into a model repository, with a card.

    The card has provenance, accuracy, digest and a note on the licence. New repositories are private.
    """
    from vlexport.bundle import hub

    with phases("push") as progress:
        pushed = hub.push(bundle, target, progress=progress)
    if as_json:
        show_json("push", pushed.to_json())
        return
    print_line(f"digest {pushed.digest}")
    show(pushed.place)


def pull(
    source: str = argument("SOURCE", "org/name[@revision] on the Hub, or a directory."),
    name: str | None = argument("NAME", "Bundle, where the repository has several.", default=None),
    output_dir: Path = BUNDLES_DIR,
    as_json: bool = JSON,
) -> None:
    """Get a bundle out of a model repository, verified.

    Nothing is run. The bundle is used only once its digest is approved: `vlexport trust`.
    """
    from vlexport.bundle import hub

    with phases("pull") as progress:
        pulled = hub.pull(source, name, output_dir=output_dir, progress=progress)
    if as_json:
        show_json("pull", pulled.to_json())
        return
    if not pulled.trusted:
        approve = shlex.join(["vlexport", "trust", str(pulled.bundle), pulled.digest])
        print_line(
            f"not approved: an engine is a program. If {pulled.digest} is the digest that its builder "
            f"published: {approve}"
        )
    show(str(pulled.bundle))
