"""One more engine in one file: a llama.cpp server, counted from its answers (`adapter`).

    python -m examples.llama_cpp [--server http://127.0.0.1:8080]

sends a few prompts to a llama.cpp server and prints the pooled ratios; without a server, to a stand-in with the
answers of a real one.
"""
