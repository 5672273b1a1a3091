"""A real vLLM server with speculative decoding on a CPU, watched through the `specdec.*` counters.

`python -m examples.vllm_demo` runs it whole. The modules stand alone and import nothing heavy when imported, so the
tests build on them: `tiny_model` (models made offline), `otlp_receiver` (where the counters arrive), `server` (the
vLLM process), `traffic` (what clients send, and what they got) and `report` (the ratios, from summed counters).
"""
