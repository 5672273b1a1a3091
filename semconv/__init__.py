"""The semantic conventions as data, and the tables that the documentation shows of them.

`manifest.yaml` and `specdec.yaml` are a registry in the format of OpenTelemetry Weaver; everything else here reads it.
Nothing of it is in the wheel.
"""
