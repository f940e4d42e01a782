"""Compiles prefill and the decode loop with its kernels for an H100, on a machine without one: a script, for jax must not look for a GPU.

python tests/h100.py        a JSON object for each method: what is wrong (see loops.py), how many kernels it calls, and what prefill of
                            two and of five layers takes beside weights and cache
"""

import functools
import importlib
import json
import os
from types import ModuleType
from unittest import mock

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh
from loops import compiled_loop, faults_of, prefill_temporaries

from pallas_kernels import append_attend, attention, dispatch, flush, fused_layer, gather, matmul, norm, replaced_attention, rope_append

NAME, MULTIPROCESSORS = "NVIDIA H100 80GB HBM3", 132
TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {MULTIPROCESSORS} fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072 device_address_bits: 64
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  name: "{NAME}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} device_description_str: "{NAME}"
"""
# The cache, rows, drafts a round, the draft, and whether the rows share a pool of pages.
METHODS = {
    "quantspec": ("int8", 2, 4, "quantspec", False),
    "quantspec, one row": ("int8", 1, 4, "quantspec", False),
    "sparse": ("int8", 2, 4, "sparse", False),
    "sparse, paged": ("int8", 2, 4, "sparse", True),
    "autoregressive, int8": ("int8", 2, 0, "none", False),
    "autoregressive, full": ("full", 2, 0, "none", False),
}


def main() -> None:
    use_first_kernels()
    prefill = functools.cache(lambda kind: [prefill_temporaries(kind, layers, place=place) for layers in (2, 5)])
    for name, (kind, rows, gamma, draft, paged) in METHODS.items():
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract_device())):
            settings = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512}
            settings |= {"draft": draft, "dtype": jnp.bfloat16, "temperature": 1.0, "place": place, "in_loop": in_loop, "paged": paged}
            compiled, state = compiled_loop(kind, rows, gamma, **settings)
            found = prefill(kind)
        kernels = compiled.as_text().count('custom_call_target="mosaic_gpu')
        print(json.dumps({"method": name, "faults": faults_of(compiled, state), "kernels": kernels, "prefill": found}), flush=True)


def use_first_kernels() -> None:
    """From here on each operation takes the kernel that an H100 would run: no GPU is there to be asked."""
    dispatch.compute_capability = lambda: 9.0
    for package in (append_attend, rope_append, attention, replaced_attention, fused_layer, flush, gather, matmul, norm):
        package.choose = choose


def abstract_device() -> AbstractDevice:
    return AbstractDevice(device_kind=NAME, num_cores=MULTIPROCESSORS, platform="gpu")


@functools.cache
def sharding() -> NamedSharding:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return NamedSharding(topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",)), PartitionSpec())


def place(x) -> jax.ShapeDtypeStruct:
    """An array like x, on the H100."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding())


def in_loop(draft):
    """The draft as the decode loop has it on a GPU: its head in INT8."""
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        return draft.in_loop()


def choose(operation: str, implementation: str, *args, weight_format=None, rows=None, slow_reference=True, **settings) -> ModuleType:
    module = lambda name: importlib.import_module(f"pallas_kernels.{operation}.{name}")
    candidates = [kernel.module_name for kernel in dispatch.kernels(operation, weight_format) if kernel.takes_rows(rows)]
    possible = [name for name in candidates if name != "triton" and not module(name).unsupported(*args, **settings)]
    return module(possible[0] if implementation == "auto" and possible else "reference")


if __name__ == "__main__":
    main()
