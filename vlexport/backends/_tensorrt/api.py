"""How both flavours are spoken to: what they log, what they build for, and how networks are typed."""

from __future__ import annotations

from typing import Any

from vlexport.errors import UnsupportedError


class Log:
    """What the library said: reasons for the errors that we raise, and how much memory an engine takes."""

    def __init__(self, library: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.remarks: list[str] = []
        severity = library.ILogger.Severity
        outer = self

        class Logger(library.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                library.ILogger.__init__(self)

            def log(self, level: Any, message: str) -> None:
                if level in (severity.ERROR, severity.INTERNAL_ERROR):
                    outer.errors.append(message)
                elif level == severity.WARNING:
                    outer.warnings.append(message)
                elif level == severity.INFO:
                    outer.remarks.append(message)

        self.logger = Logger()

    def reason(self) -> str:
        return "; ".join(self.errors[-3:])[:1000] or "the library gives no reason"


def strongly_typed(library: Any) -> int:
    """Newer libraries know no other kind of network and may have dropped the flag."""
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def aim(library: Any, config: Any, targets: tuple[str, ...]) -> None:
    """Compute capabilities, where the library builds for GPUs that are not here."""
    known = getattr(library, "ComputeCapability", None)
    if known is None:
        return
    names = {name.lower() for name in known.__members__ if name.startswith("SM")}
    wrong = [target for target in targets if target not in names]
    if wrong:
        raise UnsupportedError(
            f"{library.__name__} {library.__version__} does not build for {', '.join(wrong)}. "
            f"It builds for: {', '.join(sorted(names, key=lambda name: int(name[2:])))}."
        )
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(getattr(known, target.upper()), index)
