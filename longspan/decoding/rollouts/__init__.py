"""Sampling many answers for reinforcement learning: stored drafts, a synchronous step of many ranks, its simulator.

`pool` keeps drafts, `rows` and `step` advance the sequences of one rank pass by pass, `engine` is the step of all ranks with
its bubble mode, `distributed` runs it over processes, `simulate` says what it gives for ranks that aren't there.
"""
