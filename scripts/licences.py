"""List what is installed, and under which licence: python scripts/licences.py, or make licences.

The licence is what a package says in its own metadata; nobody checked its files for others.
"""

from collections import Counter
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageMetadata, distributions

_UNKNOWN = "(not said)"
_CLASSIFIER = "License :: "


def main() -> None:
    """One row a package, by name, and how often each licence occurs."""
    rows = sorted(list_licences(distributions()), key=lambda row: row[0].lower())
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, version, licence in rows:
        print(f"{name:{widths[0]}}  {version:{widths[1]}}  {licence}")
    counts = Counter(licence for _, _, licence in rows)
    print(f"\n{len(rows)} packages:")
    for licence, count in counts.most_common():
        print(f"{count:5}  {licence}")


def list_licences(installed: Iterable[Distribution]) -> list[tuple[str, str, str]]:
    """(name, version, licence) of each package."""
    return [(d.metadata["Name"], d.version, licence_of(d.metadata)) for d in installed]


def licence_of(metadata: PackageMetadata) -> str:
    """The SPDX expression, or else the classifiers, or else the first line of the free text.

    Metadata before 2.4 has no expressions (PEP 639). The free text may be a whole licence.
    """
    if expressions := metadata.get_all("License-Expression"):
        return str(expressions[0])
    classifiers = [
        row.removeprefix(_CLASSIFIER).removeprefix("OSI Approved :: ")
        for row in metadata.get_all("Classifier") or []
        # "OSI Approved" alone names none.
        if row.startswith(_CLASSIFIER) and row != f"{_CLASSIFIER}OSI Approved"
    ]
    if classifiers:
        return " AND ".join(sorted(classifiers))
    lines = "".join(metadata.get_all("License") or []).strip().splitlines()
    return lines[0] if lines else _UNKNOWN


if __name__ == "__main__":
    main()
