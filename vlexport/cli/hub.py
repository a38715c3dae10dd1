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
    from vlexport.bundle import Bundle, hub

    with phases("push") as progress:
        progress("verify", 0.0)
        opened = Bundle.open(bundle)
        progress("copy", 0.0)
        place = hub.push(opened, target)
    if as_json:
        show_json("push", {"place": place, "digest": opened.digest})
        return
    print_line(f"digest {opened.digest}")
    show(place)


def pull(
    source: str = argument("SOURCE", "org/name[@revision] on the Hub, or a directory."),
    name: str | None = argument("NAME", "Bundle, where the repository has several.", default=None),
    output_dir: Path = BUNDLES_DIR,
    as_json: bool = JSON,
) -> None:
    """Get a bundle out of a model repository, verified.

    Nothing is run. The bundle is used only once its digest is approved: `vlexport trust`.
    """
    from vlexport.bundle import Bundle, hub

    with phases("pull") as progress:
        progress("copy", 0.0)
        path, digest = hub.pull(source, output_dir, name=name)
    inspected = Bundle.inspect(path)
    if as_json:
        show_json("pull", {"bundle": str(path), "digest": digest, "trusted": inspected.trusted})
        return
    if not inspected.trusted:
        approve = shlex.join(["vlexport", "trust", str(path), digest])
        print_line(
            f"not approved: an engine is a program. If {digest} is the digest that its builder published: "
            f"{approve}"
        )
    show(str(path))
