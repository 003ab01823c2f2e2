"""What a module of ours imports is found, also where little of it is parsed."""

from __future__ import annotations

import ast

import pytest

from storage.config.own_modules import imports_of, parsed_with_imports


@pytest.mark.parametrize(
    "text",
    [
        "import a\n\n\ndef f():\n    pass\n",
        "import a\n\n\ndef f():\n    import b\n",
        "@decorated\ndef f():\n    pass\n\n\nimport a\n",
        "class A:\n    from a import b\n",
        'words = """\nclass A:\n"""\nimport a\n',
        'words = """\nclass A:\n"""\nother = "import"\n\n\nasync def f():\n    import a\n',
        "import a\n\nwords = '''\ndef f():\n'''\n",
    ],
)
def test_no_import_is_missed(text: str) -> None:
    whole = list(imports_of("m", ast.parse(text).body))
    assert list(imports_of("m", parsed_with_imports(text).body)) == whole != []


def test_what_follows_the_imports_is_not_parsed() -> None:
    assert len(parsed_with_imports("import a\n\n\ndef f():\n    pass\n").body) == 1
