"""The command `otel-specdec`, for the people who run engines: `doctor` and `watch`.

Never imported by `import otel_specdec`, nor in an engine's process. `doctor` needs nothing but what the package itself
needs; `watch` and the OTLP port of `doctor --prove` need the extra `cli`.
"""
