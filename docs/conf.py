"""The documentation site: Sphinx reads the Markdown pages of this folder, and the docstrings of the public names.

    make docs

A warning is an error there, so a link to a page, a heading or a public name that does not exist stops the build.
"""

from __future__ import annotations

import zeroir

project = "zeroir"
author = "the zeroir developers"
release = zeroir.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["records"]
nitpicky = True
# Only links to public names must lead somewhere: others' documentation is not looked up, so a build needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!zeroir\.\w+$).*")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# No highlighter knows the language of programs.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"zeroir {release}"
copybutton_prompt_text = "$ "
