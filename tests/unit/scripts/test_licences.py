"""scripts/licences.py: which words of a package's metadata count as its licence."""

from email.message import Message
from importlib.metadata import PackageMetadata, distributions
from typing import cast

import pytest
from licences import licence_of, list_licences


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "Apache-2.0"), ("License", "other")], "Apache-2.0"),
        (
            [
                ("Classifier", "License :: OSI Approved"),
                ("Classifier", "License :: OSI Approved :: MIT License"),
                ("License", "other"),
            ],
            "MIT License",
        ),
        ([("License", "  BSD\nRedistribution and use ...")], "BSD"),
        ([("License", "")], "(not said)"),
        ([], "(not said)"),
    ],
)
def test_licence_is_the_expression_or_the_classifiers_or_the_first_line_of_the_text(
    fields: list[tuple[str, str]], licence: str
) -> None:
    metadata = Message()
    for name, value in fields:
        metadata[name] = value

    assert licence_of(cast("PackageMetadata", metadata)) == licence


def test_every_installed_package_is_listed_with_its_version() -> None:
    rows = {name: (version, licence) for name, version, licence in list_licences(distributions())}

    assert rows["pytest"][1] == "MIT"
    assert set(rows) == {distribution.metadata["Name"] for distribution in distributions()}
