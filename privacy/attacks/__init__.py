"""Attacks as evidence: whether a model or an update tells who was in its training, or what they looked like.

membership.py   was this example, this patient, among the training data? By the loss
canaries.py     a lower bound on epsilon from one run with made-up units; traces.py finds them in models and updates
inversion.py    the image behind a gradient; recovery.py the algebra, likeness.py how good it is, exhibit.py shows it

An attack that fails proves nothing. One that succeeds refutes a promise.
"""
