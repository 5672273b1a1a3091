"""Rollouts and gateways: speculative decoding counted from responses, each generation once.

Each module is a program of its own, with the in-memory exporter; a test runs each of them. Without an engine at hand
they run against `replay`, which answers with what real vLLM and SGLang servers answered here:

    python -m examples.rollouts.slime_rollout      a rollout function that reads SGLang's native responses
    python -m examples.rollouts.agentic_session    branches that share their beginning
    python -m examples.rollouts.async_server       a wrapper around an asynchronous engine, as verl has one
    python -m examples.rollouts.gateway            a proxy before an OpenAI-compatible server, streaming too
"""
