"""What GPU kernels are written in: one warp's instructions (ptx), tensor-core products (fragments), arithmetic (numerics), launching.

triton_unpack.py is the same for the kernels in Triton, which share no more than that.
"""
