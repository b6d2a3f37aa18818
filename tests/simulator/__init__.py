"""A simulator of a store's life, after TigerBeetle's VOPR: one seed drives everything, a model knows what must be there.

    python -m tests.simulator --seed 7                one life, its plan and what became of it
    python -m tests.simulator --steps 1000000         lives from seed 1 on, until so many steps were done
    python -m tests.simulator --replay FILE           a plan that failed, as it was written
    python -m tests.simulator --plant NAME            with a planted fault, which must be found

Owns random lives and their judgement.  It knows the package only by its public calls: what must be there afterwards is said
by `model`, which is plain Python, and by `oracle`, the second reader.  The modules:

    plan        operations from a seed: what is done, and which fault comes when
    model       what must be in the store after each of them
    session     one process that has the store open: it does the operations and holds each answer against the model
    life        the parent of these processes: kills, lost power, damage, and what is left then
    rot         damage to the files of a store that nobody has open, and what every way of opening makes of it
    java        RocketMQ's own store on the same files, between two of these processes
    shrink      from a long plan that fails to a short one
    planted     faults put into the package on purpose, each of which must be found
    layer       the library of tests/faults under this process

Invariants: an operation is a pair of a kind and a number, and everything about it follows from these, so that any subset
of a plan is a plan.  No clock but the plan's, no thread that acts by itself: the same plan gives the same life.
"""
