"""Arguments of DPSGD for tests that vary one setting."""

from dataclasses import fields
from typing import Any

from lightning_fedleak.defenses import ClipSettings, ReleaseSettings, Users


def grouped(**settings: Any) -> dict[str, Any]:
    """Return arguments of DPSGD from its settings by the names of their fields."""
    arguments = dict(settings)
    for argument, group in (("clip", ClipSettings), ("release", ReleaseSettings), ("unit", Users)):
        names = [field.name for field in fields(group) if field.name in arguments]
        values = {name: arguments.pop(name) for name in names}
        if values:
            arguments[argument] = group(**values)
    return arguments
