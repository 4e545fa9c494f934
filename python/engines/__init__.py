"""A whole vLLM with this package: carried to a machine without a network, and tested there.

``python -m engines fetch`` and ``pack`` run on a machine with a network, ``unpack`` and ``run`` on one with GPUs, in the folder ``python``.
Only ``case``, which ``run`` calls, needs PyTorch and vLLM.
"""
