"""The same defenses in engines people already run: PyTorch DDP, Flower, NVFlare.

Each adapter is imported on its own, so that none of the engines has to be installed::

    from gradveil.engines import ddp
    from gradveil.engines import flower
"""
