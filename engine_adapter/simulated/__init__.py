"""A SIMULATION, for scale tests only: engines that speak vLLM's protocol and compute nothing.

    python -m engine_adapter.simulated --ports 9001,9002 --model NAME --speed 20

Each port is one replica: a real HTTP server with vLLM's routes, errors and KV events, a real block
cache and a real queue with continuous batching. Only the forward pass is missing: a step takes as
long as engine_adapter.simulated.timing says, divided by --speed. Answers are made of token ids that
depend on the prompt and the seed. Times that it reports are of the real clock.

    options     what an engine is like
    engine      one replica with all its parts, and its restarts
    server      HTTP -> request -> jobs -> generation -> answers
    replica     the scheduler on the event loop's clock
    scheduler   queue, batch and preemption -> cache, timing
    limits      what bounds them
    step        which tokens are computed together
    events      what the cache does, as KV events
    words       token ids without a tokenizer; tokenizer: with a model's
    faults      POST /simulate/fault
"""
