"""Published figures of GPUs and of the servers that they are sold in.

Peaks are dense, without structured sparsity; those of float32 are without TF32, which has its own.
`memory` is what `torch.cuda.get_device_properties` reports, in GiB: less than the figure on the
box, because the box counts 10^9 bytes and the driver and error correction keep some. It was read
from messages of torch in public issues where one is named, and is assumed elsewhere.
docs/reference/machines.md names the documents of every figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.options.mixed_precision import HALF_DTYPES

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU in its usual server.

    Attributes:
        kind: its name in presets.
        architecture: whose GPUs share fitted figures.
        memory_gib: of one GPU, as torch reports it.
        tflops: pairs (dtype, dense peak).
        tb_per_s: bandwidth of its memory.
        units: streaming multiprocessors or compute units.
        link: what joins the GPUs of one server.
        link_gb_per_s: of one GPU, in one direction.
        host_gpus: at most so many under one link.
        network_gbit: of `host_gpus`, in one direction; presets share it evenly.
        source: the documents of these figures.
        dates: when the documents were issued.
        memory_source: where `memory_gib` was seen; empty where it is assumed.
        host_gb_per_s: between a GPU and its host, in one direction: PCIe with 16 lanes of the
            generation that the data sheet names (3: 16, 4: 32, 5: 64), or NVLink-C2C of which each
            of a Grace processor's two GPUs has half.
        host_gib: of the memory of the host, the share of each GPU.

    Matrix products get a workspace from torch's allocator, for each handle of the library: 32 MiB
    on GPUs from Hopper on (NVIDIA's recommendation for cublasSetWorkspace) and 8,320 KiB on older
    ones (`CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`, torch's default). What ROCm takes is not known.
    """

    kind: str
    architecture: str
    memory_gib: float
    tflops: tuple[tuple[str, float], ...]
    tb_per_s: float
    units: int
    link: str
    link_gb_per_s: float
    host_gpus: int
    network_gbit: float
    source: str
    dates: str
    memory_source: str = ""
    host_gb_per_s: float = 64
    host_gib: float = 256

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace of one handle."""
        if self.link == "xgmi":
            return 0
        return 32 * 2**20 if self.architecture in ("hopper", "blackwell") else 8320 * 2**10


def _peaks(
    half: float, single: float, double: float, eighth: float = 0.0, *, tf32: bool = True
) -> tuple[tuple[str, float], ...]:
    """Peaks by dtype; products in TF32 have half the rate of those in 16 bits on all that do."""
    found = [*((name, half) for name in HALF_DTYPES), ("float32", single), ("float64", double)]
    if tf32:
        found.append(("tf32", half / 2))
    if eighth:
        found.append(("float8_e4m3fn", eighth))
    return tuple(found)


def _blackwell(
    half: float, single: float, double: float, eighth: float
) -> tuple[tuple[str, float], ...]:
    """Peaks with those of products that apply a scale for each 32 elements (MXFP8)."""
    return (*_peaks(half, single, double, eighth), ("mxfp8", eighth))


_HOPPER = _peaks(989.4, 66.9, 66.9, 1978.9)
_AT_500_W = (500 / 700) ** (1 / 3)  # of the clock at 700 W, as power grows with its cube
_A100 = _peaks(312.0, 19.5, 19.5)

GPUS = (
    Gpu(
        "H100",
        "hopper",
        79.1,
        _HOPPER,
        3.35,
        132,
        "nvlink",
        450,
        8,
        3200,
        "H100 SXM data sheet; DGX H100 data sheet",
        "2023",
        "vllm-project/vllm#27508",
    ),
    Gpu(
        "H100-96",
        "hopper",
        95.0,
        tuple((name, round(peak * _AT_500_W, 1)) for name, peak in _HOPPER),
        2.4,
        132,
        "nvlink",
        450,
        8,
        3200,
        "H100 SXM data sheet; torchtitan's description of its H100: 96 GB of HBM2e, and 500 W, for"
        " which peaks are lowered by the cube root of the power; Grand Teton",
        "2024",
        "torchtitan's logs",
    ),
    Gpu(
        "H100-PCIe",
        "hopper",
        79.1,
        _peaks(756.0, 51.2, 51.2, 1513.0),
        2.0,
        114,
        "pcie",
        64,
        8,
        400,
        "H100 PCIe data sheet; network assumed",
        "2023",
    ),
    Gpu(
        "H200",
        "hopper",
        139.8,
        _HOPPER,
        4.8,
        132,
        "nvlink",
        450,
        8,
        3200,
        "H200 SXM data sheet; DGX H200 data sheet",
        "2024",
    ),
    Gpu(
        "B200",
        "blackwell",
        178.4,
        _blackwell(2250.0, 75.0, 37.0, 4500.0),
        7.7,
        148,
        "nvlink",
        900,
        8,
        3200,
        "HGX B200 data sheet; DGX B200 data sheet",
        "2025",
    ),
    Gpu(
        "B300",
        "blackwell",
        268.0,
        _blackwell(2250.0, 75.0, 1.25, 4500.0),
        8.0,
        148,
        "nvlink",
        900,
        8,
        6400,
        "HGX B300 data sheet; DGX B300 data sheet",
        "2025",
    ),
    Gpu(
        "GB200",
        "blackwell",
        184.3,
        _blackwell(2500.0, 80.0, 40.0, 5000.0),
        8.0,
        148,
        "nvlink",
        900,
        72,
        28800,
        "GB200 NVL72 data sheet",
        "2024",
        host_gb_per_s=225,
        host_gib=240,
    ),
    Gpu(
        "GB300",
        "blackwell",
        276.0,
        _blackwell(2500.0, 80.0, 1.3, 5000.0),
        8.0,
        148,
        "nvlink",
        900,
        72,
        57600,
        "GB300 NVL72 data sheet",
        "2025",
        host_gb_per_s=225,
        host_gib=240,
    ),
    Gpu(
        "A100",
        "ampere",
        79.25,
        _A100,
        2.039,
        108,
        "nvlink",
        300,
        8,
        1600,
        "A100 SXM data sheet; DGX A100 data sheet",
        "2021",
        "levihsu/OOTDiffusion#235",
        host_gb_per_s=32,
    ),
    Gpu(
        "A100-40",
        "ampere",
        39.45,
        _A100,
        1.555,
        108,
        "nvlink",
        300,
        8,
        1600,
        "A100 SXM data sheet; DGX A100 data sheet",
        "2020",
        "LianjiaTech/BELLE#137, TianheWu/CoSeR#10",
        host_gb_per_s=32,
        host_gib=128,
    ),
    # No bfloat16 in its tensor cores, so that runs at float32's rate.
    Gpu(
        "V100",
        "volta",
        31.7,
        (("bfloat16", 15.7), ("float16", 125.0), ("float32", 15.7), ("float64", 7.8)),
        0.9,
        80,
        "nvlink",
        150,
        8,
        400,
        "V100 SXM2 data sheet, 32 GB; DGX-1 data sheet",
        "2018",
        host_gb_per_s=16,
        host_gib=64,
    ),
    Gpu(
        "L40S",
        "ada",
        44.43,
        _peaks(362.0, 91.6, 1.43, 733.0),
        0.864,
        142,
        "pcie",
        32,
        8,
        400,
        "L40S data sheet; network assumed",
        "2023",
        "DINGYANB/MTVCrafter#21, of an RTX 6000 Ada with the same memory",
        host_gb_per_s=32,
        host_gib=128,
    ),
    # Data sheets halved where they state sparsity; float64 at 1/64 of float32.
    Gpu(
        "L4",
        "ada",
        22.0,
        _peaks(121.0, 30.3, 0.473, 242.0),
        0.3,
        58,
        "pcie",
        32,
        8,
        100,
        "L4 data sheet; network of a cloud host",
        "2023",
        host_gb_per_s=32,
        host_gib=96,
    ),
    Gpu(
        "A10G",
        "ampere",
        22.1,
        _peaks(70.0, 35.0, 0.547),
        0.6,
        80,
        "pcie",
        32,
        8,
        100,
        "A10G figures of Amazon EC2 G5 (tensor cores halved for sparsity)",
        "2021",
        host_gb_per_s=32,
        host_gib=96,
    ),
    # float16 with float32 accumulation; network assumed.
    Gpu(
        "RTX4090",
        "ada",
        23.64,
        _peaks(165.2, 82.6, 1.29, 330.3),
        1.008,
        128,
        "pcie",
        32,
        8,
        25,
        "Ada GPU architecture paper; network assumed",
        "2022",
        "ali-vilab/VGen#104",
        host_gb_per_s=32,
        host_gib=64,
    ),
    Gpu(
        "MI300X",
        "cdna3",
        191.98,
        _peaks(1307.4, 163.4, 163.4, 2614.9),
        5.3,
        304,
        "xgmi",
        448,
        8,
        3200,
        "MI300X data sheet; network of its platform",
        "2023",
    ),
    Gpu(
        "MI355X",
        "cdna4",
        287.98,
        _peaks(2516.6, 157.3, 78.6, 5033.2, tf32=False),
        8.0,
        256,
        "xgmi",
        537.6,
        8,
        3200,
        "MI355X data sheet; network of its platform",
        "2025",
    ),
)
