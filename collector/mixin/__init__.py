"""Recording rules, alerts and dashboards of the `specdec.*` counters, as code: `make mixin` writes the committed files.

What an operator installs are the files, and they read like written by hand; the code is here because three rule files
and two dashboards spell the same dozen labels some four hundred times. Names come from `otel_specdec.names`. A test
compares the files with what this code makes. Only `dashboards` needs more than the standard library.
"""
